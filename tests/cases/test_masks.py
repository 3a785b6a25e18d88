"""Masks: what hides, what is added, rows that see nothing, and what hidden keys hold."""

import math

import pytest
import torch

from hal_attn import InvalidAttentionInputError, attention, explain, reference_attention
from tests.support import DTYPES, assert_right, backends_that_take, dense, randn

SHAPES = [(1, 1, 5, 7), (2, 1, 5, 7), (2, 4, 5, 7), (2, 1, 1, 7), (1, 4, 5, 1), (1, 1, 1, 1)]


def bool_mask(*shape, seed=7):
    return randn(*shape, seed=seed) > -0.5


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["bool", "float", "float with -inf"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masks_of_every_broadcast_shape(shape, kind, dtype):
    mask = bool_mask(*shape)
    if kind != "bool":
        mask = randn(*shape, seed=8, dtype=dtype).masked_fill(~mask & (kind == "float with -inf"), -math.inf)
    assert_right(*dense(2, 5, 7, kv_heads=2, dtype=dtype, seed=1), mask=mask)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_see_nothing_are_zero_with_finite_gradients(causal, dtype):
    mask = torch.zeros(1, 1, 6, 6, dtype=torch.bool)
    mask[..., :3, :3] = True
    query, key, value = dense(1, 6, dtype=dtype, seed=2)
    assert_right(query, key, value, mask=mask, causal=causal)
    for backend in backends_that_take(query, key, value, mask=mask, causal=causal):
        assert not attention(query, key, value, mask=mask, causal=causal, backend=backend)[:, 3:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mask_of_zeros_and_lowest_numbers_keeps_the_zeros(dtype):
    lower = torch.ones(6, 6, dtype=torch.bool).tril()
    mask = torch.zeros(1, 1, 6, 6, dtype=dtype).masked_fill(~lower, torch.finfo(dtype).min)
    assert_right(*dense(1, 6, dtype=dtype, seed=3), mask=mask)


def test_true_means_may_attend():
    mask = torch.tensor([[[[True, False, False]]]])
    query, key, value = dense(1, 3, seed=4)
    for backend in backends_that_take(query, key, value, mask=mask):
        output = attention(query, key, value, mask=mask, backend=backend)
        torch.testing.assert_close(output, value[:, :1].expand_as(output))


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 5), (4, 6), (6, 4)])
@pytest.mark.parametrize("kind", ["bool", "float", "padding", "both"])
def test_causal_and_masks_apply_together(seqlen_q, seqlen_k, kind):
    mask = bool_mask(2, 1, seqlen_q, seqlen_k)
    options = {} if kind == "padding" else {"mask": mask}
    if kind == "float":
        options["mask"] = randn(2, 1, seqlen_q, seqlen_k, seed=5).masked_fill(~mask, -math.inf)
    if kind in ("padding", "both"):
        options["key_padding_mask"] = bool_mask(2, seqlen_k, seed=9)
    assert_right(*dense(2, seqlen_q, seqlen_k, seed=5), causal=True, **options)
    assert_right(*dense(2, seqlen_q, seqlen_k, seed=5), window_size=(1, 2), **options)


def test_a_hidden_first_half_and_causal_hide_the_sum_of_both():
    # By hand: keys 0 to 2 are hidden by the mask, later ones by the triangle; query i stands at key i + 2.
    mask = torch.tensor([False] * 3 + [True] * 3).view(1, 1, 1, 6)
    value = torch.tensor([9.0, 9.0, 9.0, 1.0, 2.0, 3.0]).view(1, 6, 1, 1)
    output = attention(torch.zeros(1, 4, 1, 1), torch.zeros(1, 6, 1, 1), value, mask=mask, causal=True)
    torch.testing.assert_close(output.flatten(), torch.tensor([0.0, 1.0, 1.5, 2.0]))


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_that_is_not_contiguous_reads_as_itself(kind):
    mask = randn(2, 1, 7, 5, seed=6).transpose(-1, -2)
    mask = mask > -0.5 if kind == "bool" else mask
    assert mask.stride(-1) != 1
    assert_right(*dense(2, 5, 7, seed=6), mask=mask)
    assert_right(*dense(2, 5, 7, seed=6), mask=mask[:1].expand(2, 4, 5, 7))


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(3, 5), (3, 3)])
def test_masks_of_other_ranks_are_refused_and_two_dimensions_told_where_to_go(rank, seqlen_q, seqlen_k):
    query, key, value = dense(3, seqlen_q, seqlen_k)
    mask = torch.ones((3,) * (rank - 1) + (seqlen_k,), dtype=torch.bool)
    with pytest.raises(InvalidAttentionInputError, match="key_padding_mask" if rank == 2 else "mask"):
        attention(query, key, value, mask=mask)


@pytest.mark.parametrize("shape", [(1, 1, 5, 6), (1, 2, 5, 7), (3, 1, 5, 7), (1, 1, 7, 5)], ids=str)
def test_masks_that_do_not_broadcast_are_refused(shape):
    with pytest.raises(InvalidAttentionInputError, match="mask"):
        attention(*dense(2, 5, 7), mask=torch.ones(shape, dtype=torch.bool))


def test_a_mask_of_whole_numbers_is_refused():
    with pytest.raises(InvalidAttentionInputError, match="mask"):
        attention(*dense(2, 5), mask=torch.ones(1, 1, 5, 5, dtype=torch.int64))


@pytest.mark.parametrize("garbage", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("kind", ["padding", "bool", "float"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 2.0}, {"window_size": (1, 1)}], ids=str)
def test_what_padded_keys_hold_reaches_neither_the_answer_nor_a_gradient(garbage, kind, options):
    query, key, value = dense(1, 6, seed=8)
    key[:, 4:], value[:, 4:] = garbage, garbage
    padding = torch.tensor([[True] * 4 + [False] * 2])
    mask = padding[:, None, None]
    if kind == "float":
        mask = torch.zeros(1, 1, 1, 6).masked_fill(~mask, -math.inf)
    given = {"key_padding_mask": padding} if kind == "padding" else {"mask": mask}
    clean_key, clean_value = key.clone(), value.clone()
    clean_key[:, 4:], clean_value[:, 4:] = 0.0, 0.0
    expected, _ = reference_attention(query, clean_key, clean_value, **given, **options)
    for backend in backends_that_take(query, key, value, **given, **options):
        leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        output = attention(*leaves, backend=backend, **given, **options)
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-6, msg=backend)
        gradients = torch.autograd.grad(output.sum(), leaves)
        assert all(gradient.isfinite().all() for gradient in gradients), backend
        assert not any(gradient[:, 4:].any() for gradient in gradients[1:]), backend


@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (2, 0)}], ids=str)
def test_backends_that_promise_it_keep_a_later_keys_garbage_from_earlier_queries(options):
    query, key, value = dense(1, 5, seed=9)
    key[:, 4:], value[:, 4:] = math.nan, math.nan
    promising = [
        backend
        for backend, refusals in explain(query, key, value, **options).considered
        if not refusals and backend.capabilities.masked_values_ignored
    ]
    assert promising
    expected, _ = reference_attention(query[:, :4], key[:, :4], value[:, :4], **options)
    for backend in promising:
        output = attention(query, key, value, backend=backend.name, **options)
        torch.testing.assert_close(output[:, :4].double(), expected, rtol=0, atol=1e-6)
