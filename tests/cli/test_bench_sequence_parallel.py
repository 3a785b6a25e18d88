"""`hal-attn bench sequence-parallel`: alone, on two gloo ranks, its tables and its files."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from hal_attn.bench import pictures
from hal_attn.bench.problem import Problem, mixed_lengths
from hal_attn.bench.sequence_parallel import contenders, plot, row, table
from hal_attn.bench.sequence_parallel.overlap import overlap
from hal_attn.bench.sequence_parallel.row import Row
from tests.cli.conftest import assert_plain, words

VERB = ("bench", "sequence-parallel")
SMALL = ("--heads", "4", "--kv-heads", "2", "--head-dim", "8", "--repeats", "1", "--device", "cpu")
PROBLEM = Problem((64,), False, 4, 2, 8, torch.float32, True)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Screen and JSON of one run on two ranks."""
    file = tmp_path_factory.mktemp("bench") / "found.json"
    start = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    asked = ("--tokens", "63", "--packed", "20,1,9", "--causal", "--backward", "--json", str(file))
    found = subprocess.run(
        [*start, "-m", "hal_attn.cli", *VERB, *SMALL, *asked],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "80", "OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout, json.loads(file.read_text())


def test_two_ranks_measure_every_mode_and_find_it_right(shared):
    _, found = shared
    assert found["ok"] is True
    rows = {(r["problem"]["packed"], r["passes"], r["name"]): r for r in found["rows"] if not r["peer"]}
    assert len(rows) == 2 * 2 * 5
    for packed in (False, True):
        for passes in (row.FORWARD, row.BOTH):
            local = rows[packed, passes, "local"]
            assert 0 <= local["exact_error"] < 1e-5 < local["ms"]
            for mode in ("ulysses", "ring", "kv_gather"):
                measured = rows[packed, passes, mode]
                assert (measured["refused"], measured["wrong"]) == (None, False)
                assert measured["alone"] > 1e-5
                assert measured["ideal"] == pytest.approx(measured["alone"] / 2 / measured["ms"])
                assert 0 <= measured["error"] < 1e-5 > measured["exact_error"] >= 0
                assert measured["sent"] >= measured["least"] > 0 < measured["peak"]
                assert measured["backend"] == local["backend"]
            assert "no two factors" in rows[packed, passes, "ulysses x ring"]["refused"]


def test_peers_refuse_by_name(shared):
    _, found = shared
    peers = [r for r in found["rows"] if r["peer"]]
    assert {"torch gather flash", "torch rotate flash"} <= {r["name"] for r in peers}
    for r in peers:
        assert r["ms"] is None
        assert ("packed" if r["problem"]["packed"] else "multiple of") in r["refused"] or "backward" in r["refused"]


def test_the_screen_has_facts_tables_and_reasons_once(shared):
    screen, _ = shared
    assert_plain(screen)
    assert screen.count("machine  ") == 1
    assert [line.split() for line in screen.splitlines() if line.startswith("Mode")] == [list(table.COLUMNS)] * 4
    for text in (
        "ranks 2, gloo, 1 CPU threads each",
        "dense 63 tokens, 4/2 heads of 8, float32, causal: forward+backward",
        "packed 20,1,9 (3 sequences, 30 tokens)",
        "refused, ulysses x ring: 2 ranks have no two factors above 1; 4 ranks do",
        "it has no packed sequences of different lengths",
    ):
        assert text in words(screen)


def test_alone_it_runs_one_rank_and_says_how_to_run_more(run):
    result = run(*VERB, *SMALL, "--tokens", "32", "--full", "--json", "-")
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    assert [r["name"] for r in found["rows"] if r["ms"] is not None] == ["local"]
    assert all("torchrun" in r["refused"] for r in found["rows"] if r["name"] != "local")
    assert set(found["facts"]) == {"machine", "device", "ranks", "versions", "settings", "command"}


def test_the_fastest_backend_is_one_of_those_that_can(run):
    result = run(*VERB, *SMALL, "--packed", "mixed", "--tokens", "40", "--backend", "fastest", "--json", "-")
    chosen = {r["backend"] for r in json.loads(result.stdout)["rows"] if r["name"] == "local"}
    assert chosen <= {"cpu_flash", "cpu_sdpa", "cpu_math"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tokens", "12,x"), "--tokens: got '12,x'; allowed: whole numbers of at least 1"),
        (("--packed", "4,0"), "--packed: got '4,0'"),
        (("--kv-heads", "3"), "--kv-heads: got 3; allowed: a divisor of --heads, 4"),
        (("--dtype", "int8"), "--dtype: got 'int8'; allowed: float32 or bfloat16 or float16"),
        (("--modes", "ring,rung"), "--modes: got 'rung'; allowed: any of ulysses, ring"),
        (("--device", "toaster"), "--device: got 'toaster'"),
        (("--repeats", "0"), "--repeats"),
        (("--backend", "cpu_flsh"), "did you mean cpu_flash?"),
    ],
)
def test_wrong_input_is_named_and_exits_2(run, arguments, message):
    result = run(*VERB, *SMALL, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in words(result.stderr)


def test_only_rank_0_says_what_is_wrong(run, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    result = run(*VERB, "--tokens", "x")
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", "")


def test_a_picture_without_matplotlib_is_an_error_that_says_what_to_install(run, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    result = run(*VERB, *SMALL, "--plot", str(tmp_path / "found.png"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert 'pip install "hal-attn[bench]"' in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_picture_has_a_bar_for_each_measured_row_and_the_ideal(monkeypatch, tmp_path):
    kept = []
    monkeypatch.setattr(pictures, "save", lambda figure, path: kept.append(figure))
    local = Row(PROBLEM, row.LOCAL, False, "cpu_flash", row.FORWARD, ms=8.0)
    rows = [local, replace(local, name="ring", ms=5.0, ideal=0.8), replace(local, name="other", ms=None, refused="no")]
    plot.plot(rows, 2, "title", tmp_path / "found.png")
    (axes,) = kept[0].axes
    assert [bar.get_width() for bar in axes.patches] == [8.0, 5.0]
    assert [list(line.get_xdata()) for line in axes.lines] == [[4.0, 4.0]]


def test_a_wrong_mode_is_said_and_is_not_ok():
    local = Row(PROBLEM, row.LOCAL, False, "cpu_flash", row.FORWARD, ms=8.0, exact_error=1e-7)
    wrong = replace(local, name="ring", ms=5.0, ideal=0.8, error=0.25, wrong=True)
    console = Console(width=80)
    with console.capture() as shown:
        console.print(*table.tables([local, wrong]), sep="\n")
    assert "ring WRONG: 2.5e-01 from one rank's result" in words(shown.get())
    assert [r.ok for r in (local, wrong, replace(wrong, peer=True))] == [True, False, True]
    assert not replace(local, host_waits=1).ok


def test_mixed_lengths_fill_all_tokens_with_long_and_short():
    assert mixed_lengths(65536)[:10] == tuple(16384 >> step for step in range(10))
    for tokens in (1, 31, 40, 1000, 16384, 131072):
        assert sum(mixed_lengths(tokens)) == tokens
    for tokens in (64, 1000, 16384):
        assert max(mixed_lengths(tokens)) <= tokens // 2


def test_exact_rows_are_attention_of_their_own_sequence():
    problem = Problem((3, 5), True, 4, 2, 8, torch.float32, False)
    query, key, value, _ = problem.tensors(torch.device("cpu"))
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            *(t[rows].transpose(0, 1)[None] for t in (query, key, value)), enable_gqa=True
        )[0].transpose(0, 1)
        for rows in (slice(0, 3), slice(3, 8))
    ]
    torch.testing.assert_close(problem.exact(query, key, value), torch.cat(parts)[problem.sampled()])


def test_modes_of_two_kinds_divide_the_ranks(monkeypatch):
    made = []
    monkeypatch.setattr(contenders, "_groups", made.append)
    names = [mode.name for mode in contenders.make_modes(["ring", "ulysses x ring", "ulysses x kv_gather"], 6)]
    assert names == ["ring", "ulysses x ring 2x3", "ulysses x gather 2x3"]
    assert made == [{"ring": 6}, {"ulysses": 2, "ring": 3}, {"ulysses": 2, "kv_gather": 3}]


def test_overlap_is_what_of_the_transfers_lies_under_kernels():
    def event(name, start, length, cat="kernel"):
        return {"name": name, "cat": cat, "ts": start, "dur": length}

    events = [
        event("attention", 0, 10),
        event("ncclDevKernel_SendRecv", 2, 4),
        event("merge", 9, 3),
        event("ncclDevKernel_SendRecv", 11, 4),
        event("nccl:send", 0, 100, "cpu_op"),
    ]
    found = overlap(events)
    assert (found.computation, found.communication, found.hidden, found.whole) == (12, 8, 5, 15)
    assert found.part == 5 / 8
    assert overlap([]).part == 1.0
