"""`str(plan)`: who holds what, what is sent, who computes how much, and the layout with its reason."""

import re

import pytest
import torch

from hal_attn.sequence_parallel.traffic import traffic
from tests.sequence_parallel.case import Degrees, groups, place

FULL = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "dtype": torch.float32}


def report_of(degrees, lengths, options):
    """This rank's report, and what `traffic` counts for it."""
    plan = groups(degrees).plan(lengths=lengths, **options)
    sent = traffic(plan, 4, 2, 8, 8, 4)
    return str(plan), sent.sent, (plan.rows.count, plan.rows_kv.count)


@pytest.mark.parametrize("degrees", [Degrees(ulysses=2, ring=2), Degrees(kv_gather=3), Degrees(ring=2)], ids=str)
def test_the_report_says_what_the_plan_does(pool, degrees):
    answers = pool(degrees.world).run(report_of, degrees, [40, 7, 1], {"causal": True, "replicated_prefix": 1, **FULL})
    for rank, (text, sent, rows) in enumerate(answers):
        assert f"this is rank {rank}" in text
        assert "3 packed, of 40 + 7 + 1" in text
        assert "visible     causal" in text
        assert "prefix 1" in text
        lines = [line.split() for line in text.splitlines() if re.match(r"\s+\d+\s+\d+\s+\d+\s", line)]
        assert len(lines) == degrees.world
        own = next(line for line in lines if "here" in line)
        assert (int(own[3]), int(own[4])) == rows
        assert sum(float(line[5].rstrip("%")) for line in lines) == pytest.approx(100, abs=0.5)
        assert _bytes_of(text) == pytest.approx(sent, rel=0.01)


def _bytes_of(text):
    number, unit = re.search(r"forward: this rank sends ([\d.]+) (B|KB|MB|GB) a layer", text).groups()
    return float(number) * {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9}[unit]


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        ({"causal": True}, "zigzag: causal"),
        ({}, "contiguous: every query sees every key"),
        ({"window_size": (4, 0)}, "contiguous: a window"),
        ({"causal": True, "layout": "contiguous"}, "contiguous: asked for"),
    ],
)
def test_the_layout_and_its_reason(options, layout):
    plan = place(Degrees(ring=4), 1).plan(lengths=[64], **options)
    assert f"layout      {layout}" in str(plan)
    assert "not known: give the plan num_heads" in str(plan)


def test_hops_that_nobody_needs_are_not_among_those_told():
    text = str(place(Degrees(ring=4), 0).plan(lengths=[64], window_size=(3, 0)))
    assert "hops        0, 1 of 0 to 3" in text
    assert "at most 3 keys back" in text
