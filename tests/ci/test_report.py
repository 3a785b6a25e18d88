"""What a run leaves: the table, the page, the JUnit file; and many runs side by side."""

import json
import xml.etree.ElementTree as ElementTree

import pytest
from runner import junit, matrix, report
from runner.result import Result, Status

RESULTS = (
    Result("device", Status.PASSED, "/dev/kfd"),
    Result("unit", Status.FAILED, "3 tests | 1 failure\nof <them>", "read the log", 130.0, ("unit.junit.xml",)),
    Result("bench", Status.NOT_RUN, "why"),
)


def test_the_summary_is_one_table_whatever_the_words(options):
    lines = report.markdown(options("rocm"), RESULTS).splitlines()
    assert lines[0] == "## ci/run rocm"
    assert lines[2] == "FAILED: unit; not run: bench"
    assert lines[7] == "| unit | FAILED | 2.2 min | 3 tests \\| 1 failure of <them><br>remedy: read the log |"
    assert len(lines) == 9


def test_the_page_links_the_files_and_escapes_words(options):
    page = report.page(options("rocm"), RESULTS)
    assert '<a href="unit.junit.xml">' in page
    assert "of &lt;them&gt;" in page
    assert "<script" not in page


def test_all_is_well_only_where_nothing_failed_and_something_ran():
    assert report.ok(RESULTS[:1])
    assert not report.ok(RESULTS)
    assert not report.ok(())


def test_the_steps_are_a_junit_file(tmp_path):
    junit.write(RESULTS, "ci/run rocm", tmp_path / "steps.xml")
    assert junit.counts(tmp_path / "steps.xml") == {"tests": 3, "failures": 1, "errors": 0, "skipped": 1}
    failure = ElementTree.parse(tmp_path / "steps.xml").getroot().find(".//failure")
    assert failure is not None
    assert "remedy: read the log" in str(failure.text)


@pytest.mark.parametrize("text", ["", "<testsuites><testsuite tests='3'"])
def test_a_junit_file_that_is_cut_short_counts_nothing(text, tmp_path):
    (tmp_path / "cut.xml").write_text(text)
    assert junit.counts(tmp_path / "cut.xml") == {}


def write(folder, results, options):
    (folder / "logs").mkdir(parents=True)
    report.write(options("rocm", out=folder), results, "2000-01-01T00:00:00+00:00")


def test_many_runs_side_by_side_show_what_broke_and_who_is_missing(tmp_path, options, monkeypatch):
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    write(tmp_path / "all" / "fine", RESULTS[:1], options)
    write(tmp_path / "all" / "broken", RESULTS, options)
    text, fine = matrix.collect(tmp_path / "all", ["fine", "gone"])
    lines = text.splitlines()
    assert not fine
    assert "| fine | passed | - | - | - | - | - | - |" in lines
    assert "| broken | passed | - | - | FAILED | - | - | not run |" in lines
    assert "| gone |" + " no report |" * 7 in lines
    assert next(line for line in lines if line.startswith("- ")).startswith("- gone: no report")
    assert any(line.startswith("- broken, unit: 3 tests") for line in lines)
    assert matrix.collect(tmp_path / "all" / "fine", [])[1]


@pytest.mark.parametrize("text", ['{"steps": [', "[]", '{"format": 1, "effort": "quick", "ok": true}'])
def test_a_report_that_is_none_of_ours_fails_and_is_named(text, tmp_path):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "report.json").write_text(text)
    found, fine = matrix.collect(tmp_path, [])
    assert not fine
    assert "- odd: its report.json is none of ci/run, or is cut short" in found


@pytest.mark.parametrize("text", ["{", "7", '{"cells": []}', '["cpu"]', '[{"platform": "cpu"}]'])
def test_a_list_of_runs_that_is_none_is_named_with_what_is_needed(text, ci_run, tmp_path):
    (tmp_path / "list.json").write_text(text)
    done = ci_run("--collect", str(tmp_path), "--expect", str(tmp_path / "list.json"))
    assert done.returncode == 2
    assert f"--expect {tmp_path / 'list.json'} is something else" in done.stderr
    assert "as ci/nightly.json" in done.stderr


def test_a_run_that_is_not_over_has_not_passed_and_is_in_no_summary(tmp_path, options, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "github.md"))
    folder = tmp_path / "all" / "cut"
    (folder / "logs").mkdir(parents=True)
    results = (RESULTS[0], Result("unit", Status.NOT_RUN, "no result yet"))
    report.write(options("rocm", out=folder), results, "2000-01-01T00:00:00+00:00", over=False)
    assert json.loads((folder / "report.json").read_text())["ok"] is False
    said = "NOT OVER when this was written; passed until then; not run: unit"
    assert said in (folder / "summary.md").read_text()
    assert said in (folder / "index.html").read_text()
    assert not (tmp_path / "github.md").exists()
    assert {path.name for path in folder.iterdir()} == {"logs", *report.OWN[:4]}
    text, fine = matrix.collect(tmp_path / "all", [])
    assert not fine
    assert "- cut: it was ended before it was over" in text


def test_the_report_has_what_a_program_needs(tmp_path, options, monkeypatch):
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    write(tmp_path / "one", RESULTS, options)
    content = json.loads((tmp_path / "one" / "report.json").read_text())
    assert content["format"] == report.FORMAT
    assert (content["name"], content["platform"], content["ok"]) == ("rocm", "rocm", False)
    assert [step["status"] for step in content["steps"]] == ["passed", "FAILED", "not run"]
