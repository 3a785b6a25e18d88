"""The workflows: clean for the linter, each calls `ci/run` for its platform, and no stranger's code meets a device."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from runner import constraints
from runner.platforms import PLATFORMS, SIMULATED

from hal_attn.registry import default_registry

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(FOLDER.glob("*.yml"))}
# The one that the vendor tutorial gives to be copied; a copy runs on the vendor's machine with a device.
EXAMPLE = ROOT / "docs" / "examples" / "vendor_plugin" / ".github" / "workflows" / "acme.yml"
ALL = {**WORKFLOWS, EXAMPLE.stem: yaml.safe_load(EXAMPLE.read_text())}
CELLS = json.loads((ROOT / "ci" / "nightly.json").read_text())
JOBS = [(name, job) for name, workflow in WORKFLOWS.items() for job in workflow["jobs"]]
jobs = pytest.mark.parametrize(("workflow", "job"), JOBS)
every_job = pytest.mark.parametrize(("workflow", "job"), [(name, job) for name in ALL for job in ALL[name]["jobs"]])
CALL = re.compile(r'ci/(?:run|container) (?:--simulate )?("?\$\{?\{?[\w. ]+\}?\}?"?|\w+)')


def triggers(workflow):
    """YAML 1.1 reads the key `on` as true."""
    return ALL[workflow][True]


def scripts(job):
    return "\n".join(step.get("run", "") for step in job["steps"])


@pytest.mark.parametrize("files", [sorted(FOLDER.glob("*.yml")), [EXAMPLE]], ids=["ours", "example"])
def test_the_linter_is_content(files):
    tool = Path(sys.executable).parent / "jactionlint"
    # Actions are pinned by major version here, not by commit.
    command = [tool, "--no-online", "--no-color", "--ignore=unpinned-uses"]
    command += [f"--shellcheck={tool.parent / 'shellcheck'}", *files]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_is_a_runner_for_each_platform_and_a_nightly_one():
    assert set(WORKFLOWS) == {*PLATFORMS, "nightly"}


@pytest.mark.parametrize("platform", PLATFORMS)
def test_each_calls_ci_run_for_its_platform(platform):
    called = {name for job in WORKFLOWS[platform]["jobs"].values() for name in CALL.findall(scripts(job))}
    assert platform in called
    assert called - {platform, "${{ matrix.platform }}"} == set()
    simulated = WORKFLOWS["cpu"]["jobs"]["simulated"]["strategy"]["matrix"]["platform"]
    assert sorted(simulated) == sorted(SIMULATED)


@jobs
def test_a_job_has_a_time_limit_and_few_rights(workflow, job):
    assert 0 < WORKFLOWS[workflow]["jobs"][job]["timeout-minutes"] <= 240
    assert WORKFLOWS[workflow]["permissions"] == {"contents": "read"}
    assert WORKFLOWS[workflow]["concurrency"]["group"]
    assert "secrets." not in (FOLDER / f"{workflow}.yml").read_text()


@every_job
def test_actions_are_github_s_own_by_major_version_and_leave_no_credentials(workflow, job):
    for step in ALL[workflow]["jobs"][job]["steps"]:
        if uses := step.get("uses"):
            assert re.fullmatch(r"actions/[\w-]+@v\d+", uses)
            if uses.startswith("actions/checkout"):
                assert step["with"]["persist-credentials"] is False


@every_job
def test_no_pull_request_reaches_a_machine_with_a_device(workflow, job):
    if "self-hosted" not in ALL[workflow]["jobs"][job]["runs-on"]:
        return
    assert set(triggers(workflow)) <= {"push", "schedule", "workflow_dispatch"}
    assert ALL[workflow]["jobs"][job]["if"] == "${{ !github.event.repository.fork }}"
    assert ALL[workflow]["concurrency"]["cancel-in-progress"] is False
    if "push" in triggers(workflow):
        assert triggers(workflow)["push"] == {"branches": ["main"]}


def test_the_machines_with_devices_have_the_labels_of_the_guide():
    labels = {workflow["jobs"][name]["runs-on"][-1] for name, workflow in WORKFLOWS.items() if name in SIMULATED}
    assert labels == set(SIMULATED)
    known = yaml.safe_load((ROOT / ".github" / "actionlint.yaml").read_text())["self-hosted-runner"]["labels"]
    assert set(known) == labels


@jobs
def test_reports_are_kept_also_where_the_run_failed(workflow, job):
    steps = WORKFLOWS[workflow]["jobs"][job]["steps"]
    if not CALL.search(scripts(WORKFLOWS[workflow]["jobs"][job])):
        return
    (upload,) = (step for step in steps if step.get("uses", "").startswith("actions/upload-artifact"))
    assert (upload["if"], upload["with"]["path"]) == ("always()", "ci-report")


def test_the_nightly_run_goes_on_after_a_failure_and_merges_what_is_there():
    for name in ("hosted", "devices"):
        job = WORKFLOWS["nightly"]["jobs"][name]
        assert job["continue-on-error"] is True
        assert job["strategy"]["fail-fast"] is False
    summary = WORKFLOWS["nightly"]["jobs"]["summary"]
    assert set(summary["needs"]) == {"plan", "hosted", "devices"}
    assert "hal-attn verify --merge reports/*/conformance.json" in scripts(summary)
    assert "ci/run --collect reports --expect ci/nightly.json" in scripts(summary)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell["name"])
def test_a_nightly_cell_is_one_that_ci_run_takes(cell):
    platform = PLATFORMS[cell["platform"]]
    assert re.fullmatch(r"[\w.-]+", cell["name"])
    pins = constraints.read(platform.constraints)
    for override in cell["override"].split():
        name, _ = constraints.pin(override)
        assert name in pins
    if cell.get("simulate"):
        assert default_registry().simulation(cell["simulate"])
    assert ("base" in cell) == (cell["platform"] != "cpu")


def test_every_nightly_cell_has_a_name_of_its_own_and_every_platform_a_cell():
    names = [cell["name"] for cell in CELLS]
    assert len(names) == len(set(names))
    assert {cell["platform"] for cell in CELLS} == set(PLATFORMS)
    assert {cell["simulate"].partition(":")[0] for cell in CELLS if cell.get("simulate")} == set(SIMULATED)
