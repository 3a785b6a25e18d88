"""The kit under pytest: a class to subclass, an option, and what a person reads where a check fails."""

import os
import sys
from pathlib import Path

import hal_attn_ascend.simulation.library
import pytest

import hal_attn.operators

# PyTorch knows an operator once in a process, and pytester drops the modules that its run was the first to import. So
# what registers operators is imported before it; these tests, and those after them, then pass in any order.
REGISTERING = {hal_attn.operators, hal_attn_ascend.simulation.library}

pytest_plugins = ["pytester"]
PLUGIN = ("-p", "hal_attn_pytest", "-p", "no:cacheprovider")


@pytest.fixture(autouse=True)
def only_ours(monkeypatch):
    """By `-p` alone: where the package is installed anew, its entry point would load the plugin a second time."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def run(pytester, *arguments):
    """In this process: another would import PyTorch again."""
    return pytester.runpytest_inprocess(*PLUGIN, *arguments)


def test_all_that_registers_operators_was_imported_before():
    root = Path(__file__).parents[2]
    sources = [file for folder in ("hal_attn", "platforms") for file in (root / folder).rglob("*.py")]
    found = {file for file in sources if "torch.library.Library(" in file.read_text()}
    assert found == {Path(module.__file__) for module in REGISTERING}


def test_a_subclass_gets_a_test_for_each_check(pytester):
    pytester.makepyfile("""
        from hal_attn.testing.plugin import BackendConformance

        class TestMine(BackendConformance):
            backend = "cpu_flash"
    """)
    result = run(pytester, "-v", "-k", "conforms and causal")
    result.assert_outcomes(passed=result.parseoutcomes()["passed"], deselected=result.parseoutcomes()["deselected"])
    result.stdout.fnmatch_lines(["*::TestMine::test_conforms?causal, 64 of each ?float32??*PASSED*"])


def test_an_instance_a_class_and_a_function_are_taken(pytester):
    pytester.makepyfile("""
        import torch
        from hal_attn_cpu.flash import CpuFlashBackend
        from hal_attn.testing.plugin import BackendConformance

        class TestInstance(BackendConformance):
            backend = CpuFlashBackend()

        class TestClass(BackendConformance):
            backend = CpuFlashBackend
            platform = "cpu"
            device = "cpu"
            tolerances = {torch.float32: 2.0}

        class TestFunction(BackendConformance):
            backend = lambda: CpuFlashBackend()
    """)
    run(pytester, "-k", "plain and float32 and not LSE and not packed and not gradient and not ring").assert_outcomes(
        passed=3, deselected=pytest.approx(1150, abs=200)
    )


def test_a_failure_says_which_rule_broke_and_shows_no_traceback(pytester):
    pytester.makepyfile("""
        from hal_attn.testing.plugin import BackendConformance
        from tests.conformance.faults import LseInBase2

        class TestWrong(BackendConformance):
            backend = LseInBase2
    """)
    result = run(pytester, "-k", "plain and LSE and float32 and not gradient and not packed")
    result.assert_outcomes(failed=1, deselected=result.parseoutcomes()["deselected"])
    result.stdout.fnmatch_lines(
        [
            "working on cpu, plain ?float32?: LSE: LSE: error *; it looks like this: the LSE is in base 2; the rule: *",
            "call: batch 2, 37 queries, 65 keys, 4 heads, dim 64, float32, cpu, return_lse=True",
        ]
    )
    assert "Traceback" not in result.stdout.str()
    assert "def test_conforms" not in result.stdout.str()


def test_the_option_needs_no_test_file(pytester):
    result = run(pytester, "--hal-attn-backend", "cpu_flash", "--hal-attn-backend", "cpu_sdpa", "-v", "-k", "describes")
    result.assert_outcomes(passed=2, deselected=result.parseoutcomes()["deselected"])
    result.stdout.fnmatch_lines(["*::TestConformance::test_conforms?cpu_sdpa: it describes itself?*PASSED*"])


def test_the_option_names_a_simulated_backend(pytester, monkeypatch):
    monkeypatch.setenv("HAL_ATTN_SIMULATE", "ascend:910B1")
    result = run(pytester, "--hal-attn-backend", "ascend_fa", "-k", "describes or waiting")
    result.assert_outcomes(passed=1, skipped=1, deselected=result.parseoutcomes()["deselected"])


def test_a_backend_that_cannot_run_here_fails(pytester):
    result = run(pytester, "--hal-attn-backend", "ascend_fa")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["ascend_fa on ascend, *: it cannot run here: *"])


def test_an_unknown_backend_is_an_error_with_those_known(pytester):
    result = run(pytester, "--hal-attn-backend", "nope")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*backend: got unknown backend 'nope'; allowed: *cpu_flash*"])


def test_without_a_backend_the_class_says_what_is_missing(pytester):
    pytester.makepyfile("""
        from hal_attn.testing.plugin import BackendConformance

        class TestNone(BackendConformance):
            pass
    """)
    result = run(pytester)
    result.stdout.fnmatch_lines(["*TestNone.backend: not given; allowed: *"])


@pytest.mark.parametrize("options", [(), ("--help",)], ids=["tests", "help"])
def test_others_tests_run_where_pytorch_and_hal_attn_are_broken(pytester, monkeypatch, options):
    for name in ("torch", "hal_attn"):
        pytester.makepyfile(**{f"broken/{name}": f"raise ImportError('{name} is broken')"})
    pytester.makepyfile("""
        import sys

        class TestTheirs:
            def test_one(self):
                assert not {"torch", "hal_attn"} & set(sys.modules)
    """)
    places = (str(pytester.path / "broken"), *sys.path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(place for place in places if place))
    result = pytester.runpytest_subprocess(*PLUGIN, *options)
    assert result.ret == 0, result.stdout.str() + result.stderr.str()
    if options:
        result.stdout.fnmatch_lines(["*--hal-attn-backend=NAME*"])
    else:
        result.assert_outcomes(passed=1)
