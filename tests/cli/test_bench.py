"""`hal-attn bench dispatch`, `kernels`, `packed` and `show`: tiny runs, here and over simulated vendors; their files,
pictures, comparisons and errors. What a clock shows is not looked at."""

import json
import sys
from importlib.util import find_spec

import pytest

from hal_attn.bench.report import FORMAT
from tests.cli.conftest import assert_plain, words

DISPATCH = ("bench", "dispatch", "--device", "cpu", "--rounds", "1", "--calls", "2")
KERNELS = ("bench", "kernels", "--device", "cpu", "--quick")
PACKED = ("bench", "packed", "--device", "cpu", "--quick", "--threads", "1")
TINY = ("--shape", "B=2,S=12,H=4/2,D=16,causal", "--packed", "7,3x2,H=4/2,D=16")
QUICK_DISPATCH = ("bench", "dispatch", "--device", "cpu", "--no-peers", "--quick")
# What makes a verb short that is not quick.
LESS = {"kernels": ("--seconds", "0.001"), "packed": ("--rounds", "1"), "dispatch": ("--rounds", "1", "--calls", "2")}
VENDORS = {"cuda": "flash_attn_3", "rocm": "aiter", "ascend": "ascend_fa"}


@pytest.fixture
def measured(run):
    """Runs a verb and gives the content of its JSON."""

    def start(*arguments):
        result = run(*arguments, "--json", "-")
        assert (result.exit_code, result.stderr) == (0, ""), result.output
        content = json.loads(result.stdout)
        assert (content["format"], content["ok"]) == (FORMAT, True)
        return content

    return start


def rows_of(content):
    return {row["key"]: row for row in content["rows"]}


# dispatch


def test_dispatch_times_ours_beside_what_it_ends_in(measured):
    content = measured(*DISPATCH, "--no-peers")
    rows = rows_of(content)
    for name, over, mark in (
        ("attention", "bare kernel", 2.0),
        ("attention, causal", "bare kernel, causal", 2.0),
        ("varlen_attention, PackedSequences", "bare kernel, packed", 3.0),
        ("varlen_attention, cu_seqlens", "bare kernel, packed", None),
        ("attention, nothing", "bare kernel that does nothing", None),
        ("varlen_attention, nothing in the frame", "bare kernel that does nothing", None),
    ):
        assert (rows[name]["over"], rows[name]["mark"], rows[name]["ours"]) == (over, mark, True)
        assert rows[name]["us"] > 0
        assert rows[name]["over_us"] == pytest.approx(rows[name]["us"] - rows[over]["us"])
    assert not any(row["ours"] for name, row in rows.items() if name.startswith("bare"))
    assert content["facts"]["threads"].startswith("1 ")


def test_dispatch_has_the_peers_that_are_installed_and_says_which_are_not(measured):
    content = measured(*DISPATCH)
    rows = rows_of(content)
    for name in ("diffusers", "transformers"):
        own = [row for key, row in rows.items() if key.startswith(name)]
        absent = [note for note in content["notes"] if note.startswith(name)]
        if find_spec(name) is None:
            assert (own, absent) == ([], [f"{name}: not installed; pip install {name}"])
        else:
            assert (len(own), absent) == ({"diffusers": 4, "transformers": 5}[name], [])
            assert not any(row["ours"] for row in own)
    below = rows["attention, nothing"]["below"]
    assert below == (None if find_spec("diffusers") is None else "diffusers, unchecked, nothing")
    if below is not None:
        assert rows["attention, nothing"]["mark"] == rows[below]["over_us"]


@pytest.mark.parametrize("name", ["diffusers", "transformers"])
def test_a_peer_that_is_not_installed_is_said(name, measured, monkeypatch):
    for module in [known for known in sys.modules if known.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    content = measured(*DISPATCH)
    assert not any(key.startswith(name) for key in rows_of(content))
    assert any(note.startswith(f"{name}: ") for note in content["notes"])


def test_a_peer_is_as_it_was_afterwards(measured):
    utils = pytest.importorskip("transformers.modeling_flash_attention_utils")
    measured(*DISPATCH)
    assert "flash_attn_interface" not in sys.modules
    assert utils._loaded_implementation is None


# kernels


def test_kernels_measure_every_backend_and_mark_what_is_chosen(measured):
    content = measured(*KERNELS, *TINY, "--backward", "--memory", "--tuned")
    rows = content["rows"]
    assert len(rows) == 2 * 2 * 3
    for row in rows:
        assert (row["refused"], row["wrong"], row["note"]) == (None, False, None)
        assert row["ms"] > 0 < row["teraflops"]
        assert 0 <= row["error"] < 1e-5
        assert row["peak"] > 0
        has_vendor = row["backend"] != "cpu_math" and not row["problem"]["packed"]
        assert (row["vendor_ms"] is not None, row["vendor_peak"] is not None) == (has_vendor, has_vendor)
    for which in ("chosen", "tuned"):
        assert sum(row[which] for row in rows) == 4
    assert {row["backend"] for row in rows if row["chosen"]} == {"cpu_flash"}


def test_the_cpus_own_kernel_is_called_without_a_copy(measured):
    content = measured(*KERNELS, "--shape", "S=64,H=4,D=64", "--memory")
    ratios = {row["backend"]: row["peak"] / row["vendor_peak"] for row in content["rows"] if row["vendor_peak"]}
    assert ratios == {"cpu_flash": pytest.approx(1.0, abs=0.05), "cpu_sdpa": pytest.approx(1.0, abs=0.05)}


def test_kernels_of_one_name_and_without_tuning(measured):
    content = measured(*KERNELS, *TINY, "--backend", "cpu_sdpa, cpu_math")
    assert [row["backend"] for row in content["rows"]] == ["cpu_sdpa", "cpu_math"] * 2
    assert {row["tuned"] for row in content["rows"]} == {None}


@pytest.mark.parametrize(
    "verb",
    [(*KERNELS, "--backend", "cpu_flash", *TINY[:2]), (*PACKED, "--no-memory", "--lengths", "5,3"), QUICK_DISPATCH],
    ids=lambda verb: verb[1],
)
def test_quick_says_that_times_are_rough_and_nothing_else_does(run, verb, tmp_path):
    file = tmp_path / "found.json"
    quick = run(*verb, "--json", str(file))
    assert_plain(quick.stdout)
    for text in (words(quick.stdout), json.loads(file.read_text())["notes"][0]):
        assert "--quick: few samples; times are rough, and no mark means anything" in text
    assert "times are rough" not in words(run(*(word for word in verb if word != "--quick"), *LESS[verb[1]]).stdout)


def test_a_tuned_choice_is_kept_where_the_user_keeps_them(measured, monkeypatch, tmp_path):
    monkeypatch.setenv("HAL_ATTN_CACHE_DIR", str(tmp_path))
    measured(*KERNELS, *TINY[:2], "--tuned")
    assert list(tmp_path.glob("*.json"))


@pytest.fixture
def cpu_sdpa(monkeypatch, tmp_path):
    """Gives `cpu_sdpa` another kernel. A setting of its own keeps the calls that are bound to it from other tests."""
    from hal_attn_cpu.sdpa import CpuSdpaBackend

    monkeypatch.setenv("HAL_ATTN_CACHE_DIR", str(tmp_path))
    return lambda kernel: monkeypatch.setattr(CpuSdpaBackend, "bind", lambda self, request: kernel)


def test_a_wrong_kernel_is_said_and_fails(run, cpu_sdpa):
    cpu_sdpa(lambda query, key, value: value)
    result = run(*KERNELS, "--shape", "S=13,H=4,D=24,causal")
    assert result.exit_code == 1
    assert "cpu_sdpa WRONG" in words(result.stdout)
    assert "cpu_flash WRONG" not in words(result.stdout)


def test_a_backend_that_fails_is_a_row_that_says_why(run, cpu_sdpa):
    def broken(query, key, value):
        raise RuntimeError("out of luck")

    cpu_sdpa(broken)
    result = run(*KERNELS, "--shape", "S=13,H=4,D=24,causal")
    assert result.exit_code == 1
    assert "not measured, cpu_sdpa: failed: RuntimeError: out of luck" in words(result.stdout)


# packed


def test_packed_measures_every_way_in_time_and_memory(measured):
    content = measured(*PACKED, "--batch", "tiny, equal")
    rows = rows_of(content)
    assert list(rows) == [
        f"{batch}: {way}"
        for batch in ("tiny", "equal")
        for way in ("padded route", "a call a sequence", "one padded call", "length buckets")
    ]
    for row in rows.values():
        assert row["ours"] == (row["way"] == "padded route")
        assert row["ms"] > 0 <= row["peak"]
        assert row["difference"] < 1e-5
        assert row["backend"] == "cpu_flash"
    best = min(row["ms"] for row in rows.values() if row["batch"] == "tiny" and not row["ours"])
    assert rows["tiny: padded route"]["of_best"] == pytest.approx(rows["tiny: padded route"]["ms"] / best)


def test_packed_takes_other_lengths_and_leaves_memory_out(run):
    result = run(*PACKED, "--lengths", "9,4,4", "--no-memory", "--backend", "cpu_math")
    assert result.exit_code == 0, result.output
    assert "given: 3 sequences, 17 tokens, cpu_math" in words(result.stdout)
    assert_plain(result.stdout)


# Over simulated vendors


@pytest.mark.parametrize("vendor", VENDORS)
def test_simulated_vendors_are_measured_and_said_to_be(vendor, run, monkeypatch, tmp_path):
    monkeypatch.setenv("HAL_ATTN_SIMULATE", vendor)
    file = tmp_path / "found.json"
    for verb in ((*KERNELS, *TINY), (*DISPATCH, "--no-peers")):
        result = run(*verb, "--json", str(file))
        assert result.exit_code == 0, result.output
        assert "SIMULATED: these kernels stand in for a vendor's on the CPU; the times mean nothing." in words(
            result.stdout
        )
        assert_plain(result.stdout)
        content = json.loads(file.read_text())
        assert "SIMULATED" in content["facts"]["device"]
        assert any(VENDORS[vendor] in key for key in rows_of(content))


def test_packed_runs_over_a_simulated_vendor(run, monkeypatch):
    monkeypatch.setenv("HAL_ATTN_SIMULATE", "cuda")
    result = run(*PACKED, "--batch", "mixed", "--backend", "torch_cudnn", "--dtype", "bfloat16", "--no-memory")
    assert result.exit_code == 0, result.output
    assert "SIMULATED" in result.stdout


def test_packed_gives_no_mask_to_a_kernel_that_would_not_look_at_it(run, monkeypatch, tmp_path):
    monkeypatch.setenv("HAL_ATTN_SIMULATE", "cuda")
    file = tmp_path / "found.json"
    options = ("--batch", "mixed", "--backend", "flash_attn_3", "--dtype", "bfloat16", "--json", str(file))
    result = run(*PACKED, *options, "--no-memory")
    assert result.exit_code == 0, result.output
    rows = {row["way"]: row for row in json.loads(file.read_text())["rows"]}
    masked = ("one padded call", "length buckets")
    assert all("key_padding_mask" in rows[way]["refused"] for way in masked)
    assert all(row["ms"] > 0 for way, row in rows.items() if way not in masked)


# Files, pictures, comparisons


@pytest.fixture
def file(run, tmp_path):
    """The JSON of one run of `kernels`."""
    file = tmp_path / "old.json"
    assert run(*KERNELS, *TINY[:2], "--json", str(file)).exit_code == 0
    return file


def changed(file, factor=1.0, **facts):
    content = json.loads(file.read_text())
    content["facts"] |= facts
    for row in content["rows"]:
        row["ms"] *= factor
    other = file.with_name("other.json")
    other.write_text(json.dumps(content))
    return other


def test_show_gives_the_tables_again_and_a_picture(run, file, tmp_path):
    shown = run("bench", "show", str(file), "--plot", str(tmp_path / "found.png"))
    assert shown.exit_code == 0, shown.output
    assert_plain(shown.stdout)
    assert "cpu_flash" in shown.stdout
    assert (tmp_path / "found.png").read_bytes()[1:4] == b"PNG"


def test_a_comparison_shows_ratios_and_fails_where_ours_is_slower(run, file):
    same = run("bench", "show", str(file), "--compare", str(file))
    assert same.exit_code == 0
    assert "None slower." in same.stdout
    slower = run("bench", "show", str(changed(file, 2.0)), "--compare", str(file))
    assert slower.exit_code == 1
    assert "3 of 3 of ours slower." in slower.stdout
    assert run("bench", "show", str(changed(file, 2.0)), "--compare", str(file), "--slower", "2.1").exit_code == 0
    assert run("bench", "show", str(changed(file, 0.5)), "--compare", str(file)).exit_code == 0


def test_a_comparison_across_machines_is_refused_unless_it_is_wanted_anyway(run, file):
    other = str(changed(file, machine="another machine"))
    refused = run("bench", "show", str(file), "--compare", other)
    assert refused.exit_code == 2
    assert "--compare: got a file made elsewhere: machine another machine, now" in words(refused.stderr)
    anyway = run("bench", "show", str(file), "--compare", other, "--anyway")
    assert anyway.exit_code == 0
    assert "not the same: machine another machine" in words(anyway.stdout)


def test_json_alone_on_stdout_says_on_stderr_what_is_slower(run, file):
    fast = changed(file, 1e-9)
    result = run(*KERNELS, *TINY[:2], "--json", "-", "--compare", str(fast), "--anyway")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["kind"] == "kernels"
    assert "hal-attn: slower than 1.1: " in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*KERNELS, "--shape", "S=5"), "--shape: got 'S=5'"),
        ((*KERNELS, "--packed", "4,0"), "--packed: got '4,0'"),
        ((*KERNELS, "--dtype", "int8"), "--dtype: got 'int8'"),
        ((*KERNELS, "--backend", "cpu_flsh"), "did you mean cpu_flash?"),
        ((*KERNELS, "--device", "toaster"), "--device: got 'toaster'"),
        ((*KERNELS, "--slower", "0.5"), "--slower"),
        ((*KERNELS, "--compare", "none.json"), "--compare: got none.json (No such file or directory)"),
        ((*KERNELS, "--json", "nowhere/found.json"), "--json: got nowhere/found.json"),
        ((*KERNELS, "--plot", "nowhere/found.png"), "--plot: got nowhere/found.png"),
        ((*DISPATCH, "--rounds", "0"), "--rounds"),
        ((*PACKED, "--batch", "tiny,huge"), "--batch: got 'huge'; allowed: any of skewed, equal, mixed, tiny"),
        ((*PACKED, "--lengths", "4,x"), "--lengths: got '4,x'"),
        ((*PACKED, "--backend", "cpu_flsh"), "did you mean cpu_flash?"),
        (("bench", "show", "none.json"), "FILE: got none.json"),
    ],
)
def test_wrong_input_is_named_before_anything_is_measured(run, arguments, message):
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in words(result.stderr)


@pytest.mark.parametrize("verb", [KERNELS, DISPATCH, PACKED], ids=lambda verb: verb[1])
def test_a_picture_without_matplotlib_is_an_error_that_says_what_to_install(run, verb, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    result = run(*verb, "--plot", str(tmp_path / "found.png"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert 'pip install "hal-attn[bench]"' in result.stderr
