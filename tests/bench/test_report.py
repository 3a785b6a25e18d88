"""One file format for all measurements: what is written is read back, and what is none is refused by name."""

import json
from dataclasses import replace

import pytest

from hal_attn.bench.report import FORMAT, read_report
from hal_attn.bench.views import KINDS, view_of
from hal_attn.errors import InvalidAttentionInputError
from tests.bench import reports


def written(tmp_path, report):
    file = tmp_path / "report.json"
    file.write_text(report.json())
    return file


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_read_back_as_it_was_written(kind, tmp_path):
    report = reports.ALL[kind]()
    found = read_report(written(tmp_path, report), "FILE", KINDS)
    assert found.as_json() == json.loads(report.json())
    assert list(map(str, view_of(found).tables(found))) != []


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_has_what_a_comparison_reads(kind):
    content = json.loads(reports.ALL[kind]().json())
    assert (content["format"], content["kind"]) == (FORMAT, kind)
    keys = [row["key"] for row in content["rows"]]
    assert len(set(keys)) == len(keys)
    assert {type(row["ours"]) for row in content["rows"]} == {bool}
    assert any(isinstance(row[content["measure"]], float) for row in content["rows"])


def test_what_is_no_number_becomes_null():
    report = reports.of_dispatch()
    rows = (dict(report.rows[0], us=float("nan")), dict(report.rows[1], us=float("inf")))
    assert [row["us"] for row in json.loads(replace(report, rows=rows).json())["rows"]] == [None, None]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "line 1 column 2"),
        ("[]", "this is JSON that is a list"),
        ("{}", "this is JSON of no kind known here"),
        ('{"format": 0, "kind": "dispatch", "measure": "us", "rows": []}', "format 0, kind dispatch"),
        ('{"format": 1, "kind": "cooking", "measure": "us", "rows": []}', "format 1, kind cooking"),
        ('{"format": 1, "kind": "dispatch", "rows": [{}], "measure": "us", "ok": true}', "no 'key'"),
    ],
)
def test_another_file_is_refused_by_name(text, reason, tmp_path):
    file = tmp_path / "report.json"
    file.write_text(text)
    with pytest.raises(InvalidAttentionInputError) as refusal:
        read_report(file, "--compare", KINDS)
    assert str(refusal.value).startswith(f"--compare: got {file} (")
    assert "ci/run leaves them as bench-dispatch.json" in str(refusal.value)
    assert reason in str(refusal.value)


def test_no_file_is_refused_by_name(tmp_path):
    with pytest.raises(InvalidAttentionInputError, match="No such file"):
        read_report(tmp_path / "none.json", "FILE", KINDS)
