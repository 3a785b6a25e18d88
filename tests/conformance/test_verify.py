"""`verify` over every platform that can be had here, and what it says of those that cannot."""

import subprocess
import sys

import pytest

from hal_attn import Detection, InvalidAttentionInputError
from hal_attn.registry import Registry
from hal_attn.testing import verify

SIMULATED = ("cuda:sm90", "rocm:gfx942", "rocm:flash_attn=triton", "ascend:910B1", "ascend:310P,empty_lse=nan")


def failures(report):
    return [f"{check.backend}: {check.name}: {check.message}" for check in report.checks if check.status == "failed"]


def test_the_cpu_is_right():
    report = verify("cpu")
    assert failures(report) == []
    assert report.ok
    assert report.on_real_devices
    coverage = {backend.name: backend.coverage for backend in report.backends}
    assert coverage["cpu_math"].only_peers == ()
    assert {"window", "sinks"} <= set(coverage["cpu_flash"].only_peers)
    assert not {"window", "sinks"} & set(coverage["cpu_flash"].claimed)


@pytest.mark.parametrize("simulated", SIMULATED)
def test_simulated_platforms_are_right(monkeypatch, simulated):
    monkeypatch.setenv("HAL_ATTN_SIMULATE", simulated)
    report = verify(simulated.partition(":")[0])
    assert failures(report) == []
    assert report.ok
    assert not report.on_real_devices
    assert all(backend.simulated for backend in report.backends)


def test_what_is_out_of_reach_has_a_reason(monkeypatch):
    monkeypatch.setenv("HAL_ATTN_SIMULATE", "ascend:910B1")
    report = verify(backend="cpu_math")
    cpu = next(platform for platform in report.platforms if platform.name == "cpu")
    assert not cpu.available
    assert "ascend's under HAL_ATTN_SIMULATE=ascend:910B1" in cpu.reason
    assert [backend.checks for backend in report.backends] == [()]
    report = verify("ascend", "ascend_pfa")
    (backend,) = report.backends
    assert not backend.available
    assert "310P" in backend.reason
    assert not report.ok


def test_a_platform_without_a_device_is_no_failure_and_no_pass():
    report = verify("rocm")
    assert not report.ok
    assert report.counts["failed"] == 0
    assert all(not backend.available and backend.reason for backend in report.backends)


def test_the_versions_that_a_platform_detects_are_in_the_report(monkeypatch):
    found = Detection(False, "no device", "plug one in", (("torch", "2.13.0"), ("aiter", "0.1.7")))
    monkeypatch.setattr(Registry, "detection", lambda self, platform: found)
    (platform,) = verify("rocm").platforms
    assert platform.versions == found.versions


def test_progress_counts_up_to_the_end():
    seen = []
    report = verify("cpu", "cpu_flash", progress=lambda what, done, total: seen.append((what, done, total)))
    assert [done for _, done, _ in seen] == list(range(len(report.checks) + 1))
    assert {total for _, _, total in seen} == {len(report.checks)}
    assert all(what for what, _, _ in seen[:-1])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"platform": "tpu"}, "platform: got 'tpu'; allowed: ascend, cpu, cuda, rocm"),
        ({"backend": "nope"}, "backend: got 'nope'; allowed: "),
        ({"effort": "some"}, "effort: got 'some'; allowed: quick or full"),
    ],
)
def test_wrong_arguments_name_what_is_allowed(arguments, says):
    with pytest.raises(InvalidAttentionInputError) as caught:
        verify(**arguments)
    assert says in str(caught.value)


def test_importing_the_kit_needs_no_test_library():
    """numpy, pytest and hypothesis are the tests' own."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('pytest', 'hypothesis', 'numpy')));"
        "import hal_attn.testing, hal_attn.testing.targets"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
