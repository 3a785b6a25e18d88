"""What a runner's hardware has to show: every backend whose library is there."""

import json
from types import SimpleNamespace

from runner import conformance
from runner.detection import REPORT
from runner.environment import Environment
from runner.options import Options
from runner.platforms import PLATFORMS


def entry(name, usable=True, rule=None, platform="cuda"):
    return {"name": name, "platform": platform, "usable": usable, "reason": rule and {"rule": rule}}


def command(monkeypatch, tmp_path, **options):
    """The command that the step runs."""
    entries = [
        entry("torch_cudnn"),
        entry("flash_attn", False, "installed"),
        entry("flash_attn_4", False, "broken"),
        entry("cpu_flash", platform="cpu"),
    ]
    (tmp_path / REPORT).write_text(json.dumps({"backends": entries}))
    ran = []

    def run(arguments, log, **rest):
        ran.append(arguments)
        return SimpleNamespace(ok=False, seconds=0.0, ending="ended", verdict="exit status 1")

    monkeypatch.setattr(conformance.process, "run", run)
    conformance.check(Options(out=tmp_path, **options), Environment(tmp_path / "python", {}))
    return ran[0]


def test_hardware_shows_what_is_installed_and_what_is_broken(monkeypatch, tmp_path):
    given = command(monkeypatch, tmp_path, platform=PLATFORMS["cuda"])
    assert [part for part in given if "--require" in part or "--backend" in part] == [
        "--require-hardware",
        "--backend=torch_cudnn",
        "--backend=flash_attn_4",
    ]


def test_a_simulation_shows_no_hardware(monkeypatch, tmp_path):
    given = command(monkeypatch, tmp_path, platform=PLATFORMS["cuda"], simulation="cuda:sm90")
    assert not [part for part in given if "--require" in part or "--backend" in part]
