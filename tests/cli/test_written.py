"""Each JSON that this project writes is known by what it holds, and named where another was to be given."""

from __future__ import annotations

import json

import pytest
from runner import report as ci_report
from runner.options import Options
from runner.platforms import PLATFORMS
from runner.result import Result, Status

from hal_attn.testing.merge import Merged
from hal_attn.written import BENCH, CONFORMANCE, kind_of
from tests.bench.reports import of_dispatch
from tests.cli.conftest import words
from tests.testing.reports import good

CI = "the steps of a run of ci/run"
DOCTOR = "an answer of `hal-attn doctor`"


@pytest.fixture
def files(tmp_path, run, monkeypatch):
    """A file of each kind, written by what writes it."""
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    ci_report.write(Options(PLATFORMS["cpu"], out=tmp_path), [Result("unit", Status.PASSED, "fine")], "2000-01-01")
    texts = {
        CONFORMANCE: good().to_json(),
        "merged": json.dumps(Merged((("a", good()), ("b", good()))).to_dict()),
        BENCH: of_dispatch().json(),
        DOCTOR: run("doctor", "--json").stdout,
        "an answer of `hal-attn env`": run("env", "--json").stdout,
        "an answer of `hal-attn explain`": run("explain", "--device", "cpu", "--json").stdout,
    }
    found = {CI: tmp_path / "report.json"}
    for number, (kind, text) in enumerate(texts.items()):
        found[kind] = tmp_path / f"{number}.json"
        found[kind].write_text(text)
    return found


def test_each_kind_is_known(files):
    told = {kind: kind_of(json.loads(file.read_text())) for kind, file in files.items()}
    assert told.pop("merged") == CONFORMANCE
    assert told == {kind: kind for kind in told}
    assert kind_of([1]) == "JSON that is a list"
    assert kind_of({"format": 1}) == "JSON of no kind known here"


@pytest.mark.parametrize("kind", [CI, BENCH, DOCTOR])
def test_verify_names_the_file_its_kind_and_the_one_to_give(run, files, kind):
    result = run("verify", "--merge", str(files[kind]))
    assert (result.exit_code, result.stdout) == (2, "")
    told = words(result.stderr)
    assert (
        f"FILE: got {files[kind]} (this is {kind}); allowed: reports that `hal-attn verify --json FILE` wrote" in told
    )
    assert "ci/run leaves one as conformance.json" in told


@pytest.mark.parametrize("kind", [CI, CONFORMANCE, "merged", DOCTOR])
def test_bench_names_the_file_its_kind_and_the_one_to_give(run, files, kind):
    for flag, arguments in (("FILE", [files[kind]]), ("--compare", [files[BENCH], "--compare", files[kind]])):
        result = run("bench", "show", *map(str, arguments))
        assert (result.exit_code, result.stdout) == (2, "")
        told = words(result.stderr)
        assert f"{flag}: got {files[kind]} (this is {CONFORMANCE if kind == 'merged' else kind}); allowed: " in told
        assert "ci/run leaves them as bench-dispatch.json" in told
