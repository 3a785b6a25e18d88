"""The report as data: it goes to JSON and back, counts right, and holds no host name."""

import json
import platform as machine
import socket
from dataclasses import replace

import pytest

from hal_attn.testing import (
    FEATURES,
    FORMAT,
    RULES,
    STATUSES,
    BackendReport,
    Check,
    Coverage,
    PlatformReport,
    Report,
    verify,
)

CHECK = Check(
    backend="one",
    platform="cpu",
    feature="causal",
    rule="visible keys",
    name="causal, 64 of each [float32]",
    status="passed",
    error=1e-7,
    allowed=2e-7,
    seconds=0.01,
    request="batch 2",
)
BACKEND = BackendReport(
    name="one",
    platform="cpu",
    simulated=False,
    available=True,
    checks=(CHECK, replace(CHECK, status="refused", message="softcap: have 1.0, need off", error=None, allowed=None)),
    coverage=Coverage(claimed=("causal",), only_peers=("window",)),
)
REPORT = Report(
    machine=(("python", "3.11.7"),),
    effort="quick",
    platforms=(
        PlatformReport(
            name="cpu",
            simulated=False,
            available=True,
            devices=(("cpu", "a CPU", "AVX2"),),
            versions=(("torch", "2.13.0"), ("kernels", "1.2"), ("more", "3")),
        ),
    ),
    backends=(BACKEND,),
    seconds=1.5,
)


def test_json_there_and_back():
    assert Report.from_json(REPORT.to_json()) == REPORT
    data = json.loads(REPORT.to_json())
    assert data["format"] == FORMAT
    assert data["ok"] is True
    assert data["counts"] == {"passed": 1, "failed": 0, "refused": 1, "not run": 0}


def test_a_file_without_versions_is_read():
    data = REPORT.to_dict()
    del data["platforms"][0]["versions"]
    (bare,) = REPORT.platforms
    assert Report.from_json(json.dumps(data)).platforms == (replace(bare, versions=()),)


def test_libraries_are_the_versions_without_that_of_pytorch():
    (platform,) = REPORT.platforms
    assert platform.libraries == "kernels 1.2, more 3"
    assert replace(platform, versions=(("torch", "2.13.0"),)).libraries == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "no conformance report"),
        ('{"format": 99}', "format: got 99; allowed: 1"),
        ('{"format": 1}', "a part wrong or missing"),
    ],
)
def test_what_is_no_report_is_refused(text, says):
    with pytest.raises(ValueError, match="got") as caught:
        Report.from_json(text)
    assert says in str(caught.value)


def test_ok_needs_a_pass_and_no_failure():
    failed = replace(BACKEND, checks=(*BACKEND.checks, replace(CHECK, status="failed")))
    refused = replace(BACKEND, checks=BACKEND.checks[1:])
    absent = replace(BACKEND, available=False, reason="no device", checks=())
    assert REPORT.ok
    assert not failed.ok
    assert not replace(REPORT, backends=(failed,)).ok
    assert not replace(REPORT, backends=(refused,)).ok
    assert not replace(REPORT, backends=(absent,)).ok
    (platform,) = REPORT.platforms
    own = replace(platform, checks=(replace(CHECK, backend=""),))
    assert not replace(REPORT, platforms=(own,), backends=(absent,)).ok


def test_real_devices_are_told_from_simulated_ones():
    assert REPORT.on_real_devices
    assert not replace(REPORT, backends=(BACKEND, replace(BACKEND, simulated=True))).on_real_devices
    assert not replace(REPORT, backends=()).on_real_devices


def test_a_real_report_holds_plain_values_and_no_host_name(monkeypatch):
    host = "made-up-host-4711"
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    monkeypatch.setattr(machine, "node", lambda: host)
    report = verify("cpu", "cpu_flash")
    assert Report.from_json(report.to_json()) == report
    assert host not in report.to_json()
    assert report.ok, [check.message for check in report.checks if check.status == "failed"]
    assert {check.status for check in report.checks} <= set(STATUSES)
    assert {check.feature for check in report.checks} <= set(FEATURES)
    assert {check.rule for check in report.checks} <= set(RULES)
    names = [(check.backend, check.name) for check in report.checks]
    assert len(set(names)) == len(names)
    assert all(check.message for check in report.checks if check.status != "passed")
