"""`hal-attn tuning`: what is kept, and dropping it; and measured times in `hal-attn explain`."""

import json

import pytest

from hal_attn import attention
from hal_attn.tuning import measuring
from hal_attn.tuning.race import Outcome
from tests.cli.conftest import assert_plain, words
from tests.fakes import BatchedFake, fresh, on_the_cpu  # noqa: F401
from tests.support import dense

LIKE_DENSE = ("--batch", "2", "--seqlen", "5", "--heads", "4", "--head-dim", "16", "--dtype", "float32")


class Wrong(BatchedFake):
    def forward(self, query, key, value, **options):
        return super().forward(query, key, value, **options) * 1.5


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A folder where one call was measured: `fast` and `slow`, and `wrong` left out."""
    folder = tmp_path / "kept"
    monkeypatch.setenv("HAL_ATTN_CACHE_DIR", str(folder))
    monkeypatch.setenv("HAL_ATTN_AUTOTUNE", "on")
    monkeypatch.setattr(measuring, "race", lambda names, sample: Outcome({"slow": 2.5, "fast": 0.125}, {}, 7))
    on_the_cpu(monkeypatch, Wrong("wrong"), BatchedFake("slow"), BatchedFake("fast"))
    attention(*dense(2, 5, heads=4, head_dim=16))
    return folder


def test_what_is_kept(run, folder):
    result = run("tuning")
    assert result.exit_code == 0
    assert_plain(result.stdout)
    text = words(result.stdout)
    (file,) = folder.glob("*.json")
    assert file.name in text.replace(" ", "")
    assert "platform fake device fake device" in text
    assert "- batched b2 q5 k5 h4/4 d16/16 float32 threads=1" in text
    assert "fast 0.125 ms, slow 2.5 ms (7 rounds, 20" in text
    assert "wrong left out: its result differs from that of fast, slow: output is" in text
    assert "1 file of measured choices in" in text


def test_as_json(run, folder):
    content = json.loads(run("tuning", "--json").stdout)
    assert (content["folder"], content["dropped"]) == (str(folder), False)
    (file,) = content["files"]
    assert file["identity"]["platform"] == "fake"
    assert file["problem"] is None
    (record,) = file["classes"].values()
    assert record["milliseconds"] == {"fast": 0.125, "slow": 2.5}


def test_dropping(run, folder):
    (folder / "torn.json").write_text("{")
    assert "unreadable" in run("tuning").stdout
    result = run("tuning", "--drop")
    assert words(result.stdout).endswith(f"Dropped 2 files of measured choices in {folder}.".replace(" ", " "))
    assert list(folder.glob("*.json")) == []
    assert "0 files of measured choices" in words(run("tuning").stdout)


def test_no_folder_is_nothing_kept(run, monkeypatch, tmp_path):
    monkeypatch.setenv("HAL_ATTN_CACHE_DIR", str(tmp_path / "none"))
    result = run("tuning", "--drop")
    assert result.exit_code == 0
    assert "0 files of measured choices" in words(result.stdout)
    assert not (tmp_path / "none").exists()


def test_explain_has_a_column_of_times(run, folder):
    text = words(run("explain", "--device", "cpu", *LIKE_DENSE).stdout)
    assert "Chosen fast Decided by measurement Note measured 20" in text
    assert "7 rounds (kept in" in text
    assert "Candidate Verdict Measured Why not" in text
    assert "wrong takes it - left out of the measurement: its result differs" in text
    assert "slow takes it 2.5 ms" in text
    assert "fast chosen 0.125 ms" in text


def test_explain_has_times_as_json(run, folder):
    content = json.loads(run("explain", "--json", "--device", "cpu", *LIKE_DENSE).stdout)
    assert content["source"] == "measurement"
    assert content["measurement"]["milliseconds"] == {"fast": 0.125, "slow": 2.5}
    assert list(content["measurement"]["left_out"]) == ["wrong"]
    assert content["measurement"]["rounds"] == 7
    assert content["measurement"]["origin"].startswith(str(folder))


def test_explain_without_a_measurement_has_the_source_of_the_order(run, monkeypatch):
    monkeypatch.setenv("HAL_ATTN_SIMULATE", "cuda:sm90")
    flags = ("explain", "--device", "cpu", "--seqlen", "4096")
    assert "Note the order of cuda here: measured on an H200" in words(run(*flags).stdout)
    content = json.loads(run(*flags, "--json").stdout)
    assert content["order_source"].startswith("measured on an H200")
    assert content["measurement"] is None
