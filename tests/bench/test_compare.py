"""An older file: ratios, which of ours are slower, and what must not be compared."""

from dataclasses import replace

import pytest

from hal_attn.bench.compare import compare
from hal_attn.errors import InvalidAttentionInputError
from tests.bench import reports

OLD = reports.of_dispatch()


def with_us(**by_key):
    rows = tuple(dict(row, us=by_key.get(row["key"], row["us"])) for row in OLD.rows)
    return replace(OLD, rows=rows)


def in_place(**facts):
    return replace(OLD, facts={**OLD.facts, **facts})


def test_the_same_figures_have_ratio_1_and_are_not_slower():
    found = compare(OLD, OLD, 1.1)
    assert [change.ratio for change in found.changes] == [1.0, 1.0, 1.0]
    assert (found.ok, found.differences) == (True, ())


def test_only_ours_can_be_slower():
    found = compare(with_us(attention=11.5 * 1.2, peer=90.0, bare=80.0), OLD, 1.1)
    assert [change.key for change in found.changes if found.is_slower(change)] == ["attention"]
    assert not found.ok


def test_what_counts_as_slower_is_above_the_ratio():
    new = with_us(attention=11.5 * 1.25)
    assert compare(new, OLD, 1.25).ok
    assert not compare(new, OLD, 1.24).ok


def test_one_of_ours_that_no_longer_runs_is_slower():
    found = compare(with_us(attention=None, peer=None), OLD, 1.1)
    assert [change.key for change in found.changes if found.is_slower(change)] == ["attention"]
    assert compare(OLD, with_us(attention=None), 1.1).ok


def test_rows_of_one_file_alone_are_left_out():
    new = replace(OLD, rows=(*OLD.rows[:2], dict(OLD.rows[2], key="another")))
    assert [change.key for change in compare(new, OLD, 1.1).changes] == ["bare", "attention"]
    with pytest.raises(InvalidAttentionInputError, match="without any row"):
        compare(replace(OLD, rows=new.rows[2:]), OLD, 1.1)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"device": "cuda, a device"}, "device cuda, a device, now cpu, a processor"),
        ({"machine": "Linux x86_64, 64 CPU cores"}, "machine Linux x86_64, 64 CPU cores, now"),
        ({"threads": "2 of PyTorch on the CPU"}, "threads 2"),
        ({"versions": "hal_attn 0.1.0, python 3.11.7, torch 2.12.0"}, "torch 2.12.0, now 2.13.0"),
        ({"versions": "hal_attn 0.1.0, python 3.11.7, torch 2.13.0, fa3-fwd 0.0.3"}, "fa3-fwd 0.0.3, now none"),
        ({"settings": "HAL_ATTN_SIMULATE=cuda"}, "HAL_ATTN_SIMULATE cuda, now none"),
    ],
)
def test_another_place_is_refused_and_compared_only_anyway(facts, said):
    with pytest.raises(InvalidAttentionInputError) as refusal:
        compare(OLD, in_place(**facts), 1.1)
    assert said in str(refusal.value)
    assert "--anyway" in str(refusal.value)
    found = compare(OLD, in_place(**facts), 1.1, anyway=True)
    assert any(said in difference for difference in found.differences)
    assert len(found.changes) == 3


@pytest.mark.parametrize(
    "facts",
    [
        {"versions": "hal_attn 0.0.9, python 3.11.7, torch 2.13.0"},
        {"settings": "HAL_ATTN_CACHE_DIR=somewhere HAL_ATTN_LOG_LEVEL=INFO"},
        {"command": "hal-attn bench dispatch --json old.json"},
    ],
)
def test_what_changes_no_time_of_the_machine_is_compared(facts):
    assert compare(OLD, in_place(**facts), 1.1).differences == ()


def test_two_kinds_are_not_compared():
    with pytest.raises(InvalidAttentionInputError, match="a file of kernels; allowed: a file of dispatch"):
        compare(OLD, reports.of_kernels(), 1.1)
