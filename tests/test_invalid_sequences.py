"""Wrong offsets, lengths, sequences and partial results: refused by name, also after a right call like them."""

from __future__ import annotations

import pytest
import torch

from hal_attn import (
    PackedSequences,
    explain,
    merge_attention_states,
    pack,
    unpack,
    varlen_attention,
)
from tests.fakes import fresh, refused  # noqa: F401
from tests.support import packed

OFFSETS = torch.tensor([0, 6, 10])

# what was wrong -> the argument, what the message says it was, the wrong options of varlen_attention for 10 rows
PACKED = {
    "nothing": ("cu_seqlens", "None", {}),
    "offsets list": ("cu_seqlens", "a list", {"cu_seqlens": [0, 6, 10]}),
    "offsets float": ("cu_seqlens", "float32", {"cu_seqlens": OFFSETS.float()}),
    "offsets bool": ("cu_seqlens", "bool", {"cu_seqlens": OFFSETS.bool()}),
    "offsets 2-D": ("cu_seqlens", "(1, 3)", {"cu_seqlens": OFFSETS[None]}),
    "offsets 0-D": ("cu_seqlens", "()", {"cu_seqlens": torch.tensor(10)}),
    "offsets none": ("cu_seqlens", "(0,)", {"cu_seqlens": OFFSETS[:0]}),
    "offsets elsewhere": ("cu_seqlens", "device meta", {"cu_seqlens": OFFSETS.to("meta")}),
    "offsets start": ("cu_seqlens", "(2, 6, 10)", {"cu_seqlens": torch.tensor([2, 6, 10])}),
    "plain lengths": ("cu_seqlens", "(6, 4)", {"cu_seqlens": torch.tensor([6, 4])}),
    "offsets fall": ("cu_seqlens", "6 then 4", {"cu_seqlens": torch.tensor([0, 6, 4, 10])}),
    "offsets short": ("cu_seqlens", "9", {"cu_seqlens": torch.tensor([0, 6, 9])}),
    "offsets long": ("cu_seqlens", "11", {"cu_seqlens": torch.tensor([0, 6, 11])}),
    "offsets beyond int32": ("cu_seqlens", str(2**32 + 10), {"cu_seqlens": torch.tensor([0, 2**32 + 10])}),
    "k list": ("cu_seqlens_k", "a list", {"cu_seqlens": OFFSETS, "cu_seqlens_k": [0, 6, 10]}),
    "k float": ("cu_seqlens_k", "float64", {"cu_seqlens": OFFSETS, "cu_seqlens_k": OFFSETS.double()}),
    "k elsewhere": ("cu_seqlens_k", "device meta", {"cu_seqlens": OFFSETS, "cu_seqlens_k": OFFSETS.to("meta")}),
    "k count": ("cu_seqlens_k", "1 sequences", {"cu_seqlens": OFFSETS, "cu_seqlens_k": torch.tensor([0, 10])}),
    "k start": ("cu_seqlens_k", "(1, 6, 10)", {"cu_seqlens": OFFSETS, "cu_seqlens_k": torch.tensor([1, 6, 10])}),
    "k fall": ("cu_seqlens_k", "11 then 10", {"cu_seqlens": OFFSETS, "cu_seqlens_k": torch.tensor([0, 11, 10])}),
    "k short": ("cu_seqlens_k", "9", {"cu_seqlens": OFFSETS, "cu_seqlens_k": torch.tensor([0, 6, 9])}),
    "k without q": ("cu_seqlens", "None", {"cu_seqlens_k": OFFSETS}),
    "k maximum alone": ("max_seqlen_k", "", {"cu_seqlens": OFFSETS, "max_seqlen_k": 6}),
    "k host alone": ("cu_seqlens_k_host", "", {"cu_seqlens": OFFSETS, "cu_seqlens_k_host": [0, 6, 10]}),
    "maximum small": ("max_seqlen", "5", {"cu_seqlens": OFFSETS, "max_seqlen": 5}),
    "k maximum small": ("max_seqlen_k", "5", {"cu_seqlens": OFFSETS, "cu_seqlens_k": OFFSETS, "max_seqlen_k": 5}),
    "maximum negative": ("max_seqlen", "-1", {"cu_seqlens": OFFSETS, "max_seqlen": -1}),
    "maximum float": ("max_seqlen", "6.0", {"cu_seqlens": OFFSETS, "max_seqlen": 6.0}),
    "maximum bool": ("max_seqlen", "True", {"cu_seqlens": OFFSETS, "max_seqlen": True}),
    "maximum tensor": ("max_seqlen", "a Tensor", {"cu_seqlens": OFFSETS, "max_seqlen": torch.tensor([6])}),
    "host number": ("cu_seqlens_host", "10", {"cu_seqlens": OFFSETS, "cu_seqlens_host": 10}),
    "host text": ("cu_seqlens_host", "'", {"cu_seqlens": OFFSETS, "cu_seqlens_host": "0610"}),
    "host float": ("cu_seqlens_host", "6.0", {"cu_seqlens": OFFSETS, "cu_seqlens_host": [0.0, 6.0, 10.0]}),
    "host start": ("cu_seqlens_host", "(1, 6, 10)", {"cu_seqlens": OFFSETS, "cu_seqlens_host": [1, 6, 10]}),
    "host falls": ("cu_seqlens_host", "11 then 10", {"cu_seqlens": OFFSETS, "cu_seqlens_host": [0, 11, 10]}),
    "host count": ("cu_seqlens_host", "1 sequences", {"cu_seqlens": OFFSETS, "cu_seqlens_host": [0, 10]}),
    "host end": ("cu_seqlens_host", "9", {"cu_seqlens": OFFSETS, "cu_seqlens_host": [0, 6, 9]}),
    "k host count": (
        "cu_seqlens_k_host",
        "3 sequences",
        {"cu_seqlens": OFFSETS, "cu_seqlens_k": OFFSETS, "cu_seqlens_k_host": [0, 2, 6, 10]},
    ),
    "sequences list": ("sequences", "a list", {"sequences": [6, 4]}),
}


@pytest.mark.parametrize("case", PACKED)
def test_offsets(case):
    argument, got, options = PACKED[case]
    query, key, value, sequences = packed([6, 4])
    first = refused(argument, got, varlen_attention, query, key, value, **options)
    varlen_attention(query, key, value, cu_seqlens=OFFSETS)
    varlen_attention(query, key, value, sequences=sequences)
    assert refused(argument, got, varlen_attention, query, key, value, **options) == first
    if options:
        assert refused(argument, got, explain, query, key, value, **options) == first


BESIDE = {
    "cu_seqlens": OFFSETS,
    "max_seqlen": 6,
    "cu_seqlens_host": [0, 6, 10],
    "cu_seqlens_k": OFFSETS,
    "max_seqlen_k": 6,
    "cu_seqlens_k_host": [0, 6, 10],
}


@pytest.mark.parametrize("name", BESIDE)
def test_sequences_stand_alone(name):
    query, key, value, sequences = packed([6, 4])
    given = {name: BESIDE[name]}
    refused(name, "given beside sequences", varlen_attention, query, key, value, sequences=sequences, **given)
    refused(name, "given beside sequences", explain, query, key, value, sequences=sequences, **given)


@pytest.mark.parametrize("lengths", [[6, 3], [6, 5], [6]])
def test_sequences_that_do_not_fit_the_rows(lengths):
    query, key, value, right = packed([6, 4])
    wrong = PackedSequences.from_lengths(lengths)
    for _ in range(2):
        message = refused("sequences", str(sum(lengths)), varlen_attention, query, key, value, sequences=wrong)
        assert "10" in message
        varlen_attention(query, key, value, sequences=right)


def test_sequences_of_another_device():
    query, key, value, _ = packed([6, 4])
    wrong = PackedSequences.from_lengths([6, 4], device="meta")
    refused("sequences", "device meta", varlen_attention, query, key, value, sequences=wrong)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16])
def test_integer_offsets_of_any_width_work(dtype):
    query, key, value, sequences = packed([6, 4])
    want = varlen_attention(query, key, value, sequences=sequences)
    got = varlen_attention(query, key, value, cu_seqlens=OFFSETS.to(dtype), max_seqlen=torch.tensor(9))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


MAKING = {
    "length negative": ("lengths", "-1", lambda: PackedSequences.from_lengths([3, -1])),
    "length float": ("lengths", "2.0", lambda: PackedSequences.from_lengths([3, 2.0])),
    "length bool": ("lengths", "True", lambda: PackedSequences.from_lengths([True])),
    "lengths number": ("lengths", "5", lambda: PackedSequences.from_lengths(5)),
    "lengths none": ("lengths", "None", lambda: PackedSequences.from_lengths(None)),
    "lengths text": ("lengths", "'", lambda: PackedSequences.from_lengths("34")),
    "lengths float tensor": ("lengths", "float32", lambda: PackedSequences.from_lengths(torch.ones(2))),
    "lengths elsewhere": ("lengths", "meta", lambda: PackedSequences.from_lengths(OFFSETS.to("meta"))),
    "k lengths count": ("lengths_k", "1 sequences", lambda: PackedSequences.from_lengths([3, 4], [7])),
    "k lengths negative": ("lengths_k", "-7", lambda: PackedSequences.from_lengths([3], [-7])),
    "offsets list": ("cu_seqlens", "a list", lambda: PackedSequences.from_cu_seqlens([0, 3])),
    "offsets start": ("cu_seqlens", "(3, 4)", lambda: PackedSequences.from_cu_seqlens(torch.tensor([3, 4]))),
    "offsets without values": ("cu_seqlens", "meta", lambda: PackedSequences.from_cu_seqlens(OFFSETS.to("meta"))),
    "k offsets elsewhere": (
        "cu_seqlens_k",
        "device meta",
        lambda: PackedSequences.from_cu_seqlens(OFFSETS, OFFSETS.to("meta")),
    ),
    "host start": ("host", "(1, 10)", lambda: PackedSequences.from_cu_seqlens(torch.tensor([0, 10]), host=[1, 10])),
    "host number": ("host", "10", lambda: PackedSequences.from_cu_seqlens(torch.tensor([0, 10]), host=10)),
    "host count": ("host", "1 sequences", lambda: PackedSequences.from_cu_seqlens(OFFSETS, host=[0, 10])),
    "k host alone": ("host_k", "given", lambda: PackedSequences.from_cu_seqlens(OFFSETS, host_k=[0, 6, 10])),
    "pack count": ("lengths", "1 lengths", lambda: pack(torch.zeros(2, 5, 3), [5])),
    "pack long": ("lengths", "6", lambda: pack(torch.zeros(2, 5, 3), [6, 1])),
    "pack negative": ("lengths", "-1", lambda: pack(torch.zeros(2, 5, 3), [5, -1])),
    "unpack sum": ("lengths", "4", lambda: unpack(torch.zeros(5, 3), [4])),
    "unpack negative": ("lengths", "-1", lambda: unpack(torch.zeros(5, 3), [6, -1])),
    "merge nothing": ("outputs", "no parts", lambda: merge_attention_states([], [])),
    "merge number": ("lses", "0 parts", lambda: merge_attention_states([torch.zeros(5, 4, 8)], [])),
    "merge shape": (
        "lses[0]",
        "(5, 4)",
        lambda: merge_attention_states([torch.zeros(5, 4, 8)], [torch.zeros(5, 4)]),
    ),
    "merge half": (
        "lses[0]",
        "float16",
        lambda: merge_attention_states([torch.zeros(5, 4, 8)], [torch.zeros(4, 5, dtype=torch.float16)]),
    ),
    "merge numbers": ("outputs[0]", "a float", lambda: merge_attention_states([1.0], [2.0])),
}


@pytest.mark.parametrize("case", MAKING)
def test_making_sequences_and_merging(case):
    argument, got, make = MAKING[case]
    refused(argument, got, make)


def test_one_sided_empty_sequences_are_not_left_out():
    message = refused("sequences", "sequence 1 with 0 queries and 4 keys", _one_sided().without_empty)
    assert "HAL_ATTN_EMPTY_SEQUENCES=compact" in message


def _one_sided():
    return PackedSequences.from_lengths([3, 0], [3, 4])
