"""Headless Chromium for tests: the one that is installed, driven by playwright, without playwright's own download."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser, closed at the end; without one the test fails and says what to install."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    assert found, f"none of {', '.join(NAMES)} is here: `make browser` installs it; -m 'not browser' leaves this out"
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found)
        try:
            yield browser
        finally:
            browser.close()
