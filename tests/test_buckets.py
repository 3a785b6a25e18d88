"""Where the rows of buckets go, told in two ways: by one index, and by few runs of rows."""

import pytest
import torch

from hal_attn import PackedSequences
from hal_attn.buckets import PaddedMetadataBuilder
from hal_attn.validation import packed_request


def plan_of(lengths, lengths_k=None, causal=False):
    sequences = PackedSequences.from_lengths(lengths, lengths_k)
    query, key = (torch.empty(tokens, 8, 64) for tokens in (sum(lengths), sum(lengths_k or lengths)))
    request = packed_request(query, key, key, sequences, {"causal": causal})
    return PaddedMetadataBuilder(True).build(sequences, request)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("lengths", "lengths_k"),
    [
        ([300, 17, 300, 0, 45, 17, 2], [300, 17, 300, 0, 45, 17, 2]),
        ([300, 17, 300, 6, 45, 9, 2], [310, 17, 300, 0, 40, 17, 0]),
        ([1, 2, 3, 4, 5, 6, 7, 8] * 3, [1, 2, 3, 4, 5, 6, 7, 8] * 3),
        ([5, 5, 5], [5, 5, 5]),
        ([4, 3], [0, 0]),
        ([], []),
    ],
)
def test_pieces_and_index_agree(lengths, lengths_k, causal):
    plan = plan_of(lengths, lengths_k, causal)
    sizes = [bucket.queries.count * bucket.queries.length for bucket in plan.buckets] + [plan.missing]
    begins = [sum(sizes[:number]) for number in range(len(sizes))]
    rows = torch.arange(sum(sizes)) if plan.restore is None else plan.restore
    assert len(rows) == sum(lengths)
    if plan.pieces is not None:
        told = [begins[number] + row for number, begin, end in plan.pieces for row in range(begin, end)]
        assert told == rows.tolist()


def test_few_pieces_are_told_and_many_are_not():
    apart, together = [300, 250, 310, 280], [3, 1, 4, 2] * 50
    for lengths, told in ((apart, True), (together, False)):
        assert (plan_of(lengths).pieces is not None) == told
