"""`hal-attn explain`: the choice for a call described by flags, and every refusal of every candidate."""

import json
import subprocess
import sys

import pytest
import torch

import hal_attn
from hal_attn import PackedSequences
from tests.cli.conftest import assert_plain, words
from tests.fakes import ABSENT, BatchedFake, FakeBackend, FakePlatform, claims, install, on_the_cpu

CPU = ("--device", "cpu")


def explained(run, *flags, exit_code=0):
    result = run("explain", "--json", *CPU, *flags)
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)


def test_the_choice_and_every_refusal(run):
    result = run("explain", *CPU, "--seqlen", "7", "--seqlen-k", "9", "--causal", "--sinks")
    assert result.exit_code == 0
    assert_plain(result.stdout)
    text = words(result.stdout)
    assert "Request batch 1, 7 queries, 9 keys, 16 heads, dim 64, bfloat16, cpu, causal=True, sinks" in text
    assert "Platform cpu Chosen cpu_math Decided by the default order of cpu" in text
    refusals = "- causal: have key and query lengths that differ, need equal lengths, its triangle is top-left - sinks:"
    assert text.count(refusals) == 2
    assert "cpu_math chosen" in text


def test_without_flags(run):
    assert (
        explained(run)["request"]["description"] == "batch 1, 1024 queries, 1024 keys, 16 heads, dim 64, bfloat16, cpu"
    )


FLAGS = {
    "--batch 3": {"batch": 3},
    "--seqlen 5": {"seqlen_q": 5, "seqlen_k": 5},
    "--seqlen 5 --seqlen-k 6": {"seqlen_q": 5, "seqlen_k": 6, "equal_lengths": False},
    "--seqlen 0": {"seqlen_q": 0, "tokens_q": 0},
    "--heads 6": {"heads": 6, "kv_heads": 6},
    "--heads 6 --kv-heads 2": {"heads": 6, "kv_heads": 2},
    "--head-dim 40": {"head_dim": 40, "value_head_dim": 40},
    "--value-head-dim 24": {"head_dim": 64, "value_head_dim": 24},
    "--dtype float64": {"dtype": "float64"},
    "--causal": {"causal": True},
    "--window 3,4": {"window_size": [3, 4]},
    "--window -1,0": {"causal": True, "window_size": None},
    "--mask bool": {"mask": "bool", "mask_dtype": "bool", "mask_shape": [1, 1, 1024, 1024]},
    "--mask float": {"mask": "float", "mask_dtype": "bfloat16"},
    "--key-padding-mask": {"key_padding_mask": True},
    "--softcap 30": {"softcap": 30.0},
    "--sinks": {"sinks": True},
    "--alibi": {"alibi_slopes": 1},
    "--dropout 0.1": {"dropout_p": 0.1},
    "--deterministic": {"deterministic": True},
    "--return-lse": {"return_lse": True},
    "--grad": {"needs_grad": True},
    "--scale 0.0": {"scale": 0.0},
    "--lengths 5,9,2": {"packed": True, "batch": 3, "tokens_q": 16, "tokens_k": 16, "seqlen_q": 9},
    "--lengths 5,9 --lengths-k 1,2": {"packed": True, "tokens_q": 14, "tokens_k": 3, "equal_lengths": False},
}


@pytest.mark.parametrize("flags", FLAGS)
def test_each_flag_reaches_the_request(run, flags):
    usual = explained(run)["request"]
    request = explained(run, *flags.split())["request"]
    assert {name: request[name] for name in FLAGS[flags]} == FLAGS[flags]
    assert any(usual[name] != value for name, value in FLAGS[flags].items())


def test_it_says_what_the_function_says(run):
    flags = "--lengths 5,9 --lengths-k 1,2 --heads 6 --kv-heads 2 --head-dim 8 --dtype float32 --causal --softcap 2"
    found = explained(run, *flags.split())
    query, key = torch.zeros(14, 6, 8), torch.zeros(3, 2, 8)
    sequences = PackedSequences.from_lengths([5, 9], [1, 2])
    selection = hal_attn.explain(query, key, key, sequences=sequences, causal=True, softcap=2.0)
    assert found["request"]["description"] == selection.request.describe()
    assert found["chosen"] == selection.chosen.name
    assert found["considered"] == [
        {
            "backend": backend.name,
            "verdict": "chosen" if backend is selection.chosen else "refused" if refusals else "takes it",
            "refusals": [{"rule": r.rule, "have": r.have, "need": r.need, "hint": r.hint} for r in refusals],
        }
        for backend, refusals in selection.considered
    ]


def test_json_keys(run):
    found = explained(run)
    names = ["ok", "request", "platform", "chosen", "source", "order_source", "notes", "measurement", "considered"]
    assert list(found) == names
    assert found["platform"] == {"name": "cpu", "simulated": False}
    assert [row["verdict"] for row in found["considered"]] == ["chosen", "takes it", "takes it"]


def test_no_backend_is_exit_1(run):
    flags = ("--backend", "cpu_sdpa,cpu_flash", "--sinks")
    result = run("explain", *CPU, *flags)
    assert result.exit_code == 1
    assert "Chosen none Decided by backend cpu_sdpa,cpu_flash" in words(result.stdout)
    assert "No backend takes this call" in result.stdout
    found = explained(run, *flags, exit_code=1)
    assert (found["ok"], found["chosen"]) == (False, None)
    assert [row["backend"] for row in found["considered"]] == ["cpu_sdpa", "cpu_flash"]


def test_a_fallback_is_noted(run, monkeypatch):
    monkeypatch.setenv("HAL_ATTN_FALLBACK", "allow")
    result = run("explain", *CPU, "--backend", "cpu_flash", "--sinks")
    assert result.exit_code == 0
    assert "Note backend cpu_flash refused; HAL_ATTN_FALLBACK=allow let" in words(result.stdout)


def test_long_reasons_wrap_and_hints_show(run, monkeypatch):
    on_the_cpu(monkeypatch, FakeBackend("a_backend_with_a_rather_long_name", claims(key_padding_mask=False)))
    result = run("explain", *CPU, "--key-padding-mask")
    assert result.exit_code == 1
    assert_plain(result.stdout)
    assert "key_padding_mask: have given, need none hint: pack the sequences instead: varlen_attention" in words(
        result.stdout
    )


def test_simulated_is_said(run, monkeypatch):
    simulated = FakePlatform("rocm", BatchedFake("r"))
    simulated.simulated = True
    install(monkeypatch, FakePlatform("rocm", FakeBackend("r"), device_type="xpu", detects=ABSENT, simulated=simulated))
    monkeypatch.setenv("HAL_ATTN_SIMULATE", "rocm")
    assert "Platform rocm (SIMULATED) Chosen r" in words(run("explain").stdout)


def test_an_unknown_variable_is_said_on_stderr_only(run, monkeypatch):
    monkeypatch.setenv("HAL_ATTN_BAKEND", "x")
    result = run("explain", "--json", *CPU)
    assert result.exit_code == 0
    assert json.loads(result.stdout)["chosen"] == "cpu_flash"
    assert result.stderr == "hal-attn: HAL_ATTN_BAKEND: it is ignored; did you mean HAL_ATTN_BACKEND?\n"


def test_huge_shapes_take_no_memory(run):
    found = explained(run, *["--batch", "100000", "--seqlen", "1000000", "--mask", "float", "--key-padding-mask"])
    assert found["request"]["tokens_q"] == 10**11


WRONG = {
    "--dtype int8": "--dtype: got 'int8'; allowed: a floating-point dtype",
    "--dtype nn": "--dtype: got 'nn'",
    "--device bogus": "--device: got 'bogus'; allowed: a device of PyTorch",
    "--window 3": "window_size: got (3,); allowed: None, or (left, right)",
    "--window a,b": "--window: got 'a,b'; allowed: two whole numbers",
    "--mask maybe": "--mask: got 'maybe'; allowed: bool or float",
    "--lengths 5,,2": "--lengths: got '5,,2'; allowed: whole numbers separated by commas",
    "--lengths 5,-2": "lengths: got -2",
    "--lengths 5,2 --lengths-k 3": "lengths_k",
    "--lengths-k 5": "--lengths-k: got given without --lengths",
    "--lengths 5 --batch 2": "--batch: got given beside --lengths",
    "--lengths 5 --mask bool": "mask: got given for packed sequences",
    "--lengths 99999999999999999999": "allowed: a shape whose elements PyTorch can count",
    "--batch 2000000000 --seqlen 2000000000": "allowed: a shape whose elements PyTorch can count",
    "--heads 7 --kv-heads 2": "key: got 2 heads",
    "--scale nan": "scale: got nan",
    "--softcap -1": "softcap: got -1.0",
    "--dropout 1": "dropout_p: got 1.0",
    "--backend nope": "backend: got unknown backend 'nope'",
    "--batch -1": "--batch",
    "--heads x": "--heads",
    "--nonsense": "--nonsense",
}


@pytest.mark.parametrize("flags", WRONG)
def test_wrong_input_is_one_message_on_stderr(run, flags):
    result = run("explain", "--json", *flags.split())
    assert result.exit_code == 2
    assert result.stdout == ""
    assert WRONG[flags] in result.stderr
    assert "Traceback" not in result.stderr


def test_a_wrong_setting_is_exit_2(run, monkeypatch):
    monkeypatch.setenv("HAL_ATTN_FALLBACK", "maybe")
    result = run("explain")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("hal-attn: HAL_ATTN_FALLBACK: got 'maybe'; allowed: one of error, warn, allow")


@pytest.mark.parametrize("device", ["xpu", "meta"])
def test_a_device_that_nothing_here_runs_is_exit_1(run, device):
    result = run("explain", "--device", device)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"hal-attn: no platform runs tensors on device {device}: platforms here: ")


def test_a_device_of_an_absent_vendor_says_what_lacks(run, monkeypatch):
    install(monkeypatch, FakePlatform("vendor", FakeBackend("v"), device_type="vendorchip", detects=ABSENT))
    result = run("explain", "--device", "vendorchip:0")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "vendor owns it, but: no device of it is here. plug one in" in result.stderr


def test_the_accelerator_is_the_default_device(run, monkeypatch):
    install(monkeypatch, FakePlatform("vendor", FakeBackend("v"), device_type="meta"))
    assert json.loads(run("explain", "--json").stdout)["request"]["device"] == "meta"


def test_in_processes_of_their_own(spawn):
    shown = spawn("explain", *CPU, "--sinks")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert_plain(shown.stdout)
    as_json = spawn("explain", *CPU, "--json", HAL_ATTN_NOTHING="1")
    assert json.loads(as_json.stdout)["chosen"] == "cpu_flash"
    assert "HAL_ATTN_NOTHING" in as_json.stderr
    wrong = spawn("explain", "--dtype", "int8")
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1)


def test_version_and_help(run):
    assert run("--version").stdout == f"hal-attn {hal_attn.__version__}\n"
    for arguments in ((), ("--help",), ("explain", "--help"), ("doctor", "-h"), ("env", "-h")):
        assert_plain(run(*arguments).output)
    shown = run("--help").stdout
    assert all(verb in shown for verb in ("doctor", "env", "explain", "demo"))


def test_importing_the_command_line_imports_no_verb():
    code = "import sys, hal_attn.cli; print([name for name in sys.modules if name.startswith('hal_attn.cli.')])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
