"""The conformance kit of hal_attn over each backend, on the device."""

from __future__ import annotations

import pytest
from hal_attn.testing import check_backend

from hal_attn_acme.platform import AcmePlatform

PLATFORM = AcmePlatform()


@pytest.mark.parametrize("backend", PLATFORM.backends(), ids=lambda backend: backend.name)
def test_a_backend_is_right_in_all_that_it_claims(backend):
    report = check_backend(backend, PLATFORM, "acme:0")
    assert [check.message for check in report.checks if check.status == "failed"] == []
    assert any(check.status == "passed" for check in report.checks)
