"""The guide for operators names what the code uses: files, variables, images, steps, reports, options."""

import re
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest
from runner import constraints, report
from runner.bench import KINDS
from runner.conformance import FILES
from runner.options import STEPS
from runner.platforms import PLATFORMS

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "runners.md").read_text()


@pytest.mark.parametrize("platform", PLATFORMS.values(), ids=lambda platform: platform.name)
def test_the_guide_names_what_a_platform_s_runner_needs(platform):
    for pattern in platform.device_files:
        assert f"/{pattern.partition('[')[0].rstrip('*')}" in GUIDE
    for word in (*platform.tool[:1], *platform.hide, *filter(None, (platform.home, platform.set_env))):
        assert word in GUIDE
    text = (ROOT / "ci" / "containers" / platform.name / "Dockerfile").read_text()
    (base,) = re.findall(r"^ARG BASE=(\S+)$", text, re.MULTILINE)
    assert base in GUIDE or platform.name == "cpu"


def test_the_guide_has_a_row_for_each_step_in_their_order():
    assert re.findall(r"^\| `(\w+)` \| [^|]+ \| [^|]+ \|$", GUIDE, re.MULTILINE) == list(STEPS)


def test_the_guide_names_every_report():
    for name in (*FILES.values(), "report.json", "steps.junit.xml", "summary.md", "index.html", "environment.json"):
        assert f"`{name}`" in GUIDE
    assert {"report.json", "environment.json"} <= set(report.OWN)


def test_every_option_in_the_guide_exists():
    code = (ROOT / "ci" / "runner" / "cli.py").read_text()
    calls = re.findall(r"`ci/(?:run|container)\s([^`]*)`", GUIDE)
    named = {option for call in calls for option in re.findall(r"--[a-z-]+", call)} - {"--help"}
    named |= set(re.findall(r"`(--[a-z-]+)`", GUIDE)) - {"--gpus", "--require-hardware", "--quick"}
    assert {"--simulate", "--steps", "--override", "--keep-figures"} <= named
    assert [option for option in named if f'"{option}"' not in code] == []


def test_the_guide_states_the_effort_of_each_measurement():
    def default(kind, name):
        return signature(getattr(import_module(f"hal_attn.cli.bench.{kind}"), kind)).parameters[name].default

    text = " ".join(GUIDE.split())
    assert set(KINDS) == {"kernels", "dispatch", "packed"}
    assert f"each shape for about {default('kernels', 'seconds')} s" in text
    assert f"{default('dispatch', 'rounds')} rounds of {default('dispatch', 'calls')} calls" in text
    assert f"`packed` takes {default('packed', 'rounds')} rounds" in text


@pytest.mark.parametrize("platform", PLATFORMS.values(), ids=lambda platform: platform.name)
def test_the_guide_says_which_peer_is_not_measured(platform):
    pins = constraints.read(platform.constraints)
    assert ("transformers" in pins, "diffusers" in pins) == (True, False)
    assert "pin transformers but not diffusers" in " ".join(GUIDE.split())
