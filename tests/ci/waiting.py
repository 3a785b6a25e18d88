"""Waiting for what other processes do."""

import time
from pathlib import Path


def gone(pid):
    """Whether the process is gone or only waits to be collected by whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def within(seconds, holds):
    """Whether it holds before so long has passed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.05)
    return False
