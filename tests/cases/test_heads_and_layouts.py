"""Grouped heads, head dimensions, and tensors in memory orders that a kernel may read wrongly."""

import pytest
import torch

from hal_attn import InvalidAttentionInputError, attention
from tests.support import DTYPES, assert_right, backends_that_take, dense, packed, randn


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 4), (6, 2), (4, 1), (4, 4)])
def test_grouped_heads_batched_with_as_many_keys_as_key_heads(heads, kv_heads, dtype):
    assert_right(*dense(2, 4, heads=heads, kv_heads=kv_heads, dtype=dtype, seed=1))


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_grouped_heads_packed(heads, kv_heads, causal):
    query, key, value, sequences = packed([4, 2], heads=heads, kv_heads=kv_heads, seed=2)
    assert_right(query, key, value, sequences=sequences, causal=causal)


def test_query_heads_read_the_key_head_of_their_group():
    # One key, so each query head gives the value of its key head: 0 0 0 1 1 1.
    value = torch.tensor([0.0, 1.0]).view(1, 1, 2, 1)
    query, key = randn(1, 2, 6, 4, seed=3), randn(1, 1, 2, 4, seed=4)
    for backend in backends_that_take(query, key, value):
        output = attention(query, key, value, backend=backend)
        assert output[0, :, :, 0].tolist() == [[0.0, 0.0, 0.0, 1.0, 1.0, 1.0]] * 2, backend


@pytest.mark.parametrize(("kv_heads", "value_heads"), [(0, 0), (3, 3), (8, 8), (2, 4)])
def test_key_heads_that_do_not_divide_are_refused(kv_heads, value_heads):
    query, key, value = dense(1, 3, heads=4)
    key, value = key[:, :, :1].expand(-1, -1, kv_heads, -1), value[:, :, :1].expand(-1, -1, value_heads, -1)
    with pytest.raises(InvalidAttentionInputError, match="head"):
        attention(query, key, value)


def test_as_many_heads_as_queries_keeps_both_axes_apart():
    assert_right(*dense(2, 6, heads=6, seed=5))
    assert_right(*dense(6, 6, heads=6, kv_heads=3, seed=5), causal=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "value_head_dim"), [(24, 8), (8, 24), (1, 1), (20, 20), (7, 3), (512, 512)])
def test_head_dimensions_batched(head_dim, value_head_dim, dtype):
    """The default scale is that of the head dimension given, never of a padded one."""
    shape = {"heads": 2, "kv_heads": 1, "head_dim": head_dim, "value_head_dim": value_head_dim, "dtype": dtype}
    assert_right(*dense(1, 5, seed=6, **shape))


@pytest.mark.parametrize(("head_dim", "value_head_dim"), [(24, 8), (20, 20)])
def test_head_dimensions_packed(head_dim, value_head_dim):
    query, key, value, sequences = packed(
        [3, 4, 0], heads=6, kv_heads=2, head_dim=head_dim, value_head_dim=value_head_dim, seed=7
    )
    assert_right(query, key, value, sequences=sequences, causal=True)


def test_the_default_scale_by_hand():
    query = torch.full((1, 1, 1, 20), 1.0)
    key = torch.stack([torch.zeros(20), torch.ones(20)]).view(1, 2, 1, 20)
    value = torch.tensor([0.0, 1.0]).view(1, 2, 1, 1)
    output = attention(query, key, value)
    torch.testing.assert_close(output.item(), torch.sigmoid(torch.tensor(20.0).sqrt()).item())


@pytest.mark.parametrize("name", ["query", "value"])
def test_a_head_dimension_of_zero_is_refused(name):
    query, key, value = dense(1, 3)
    if name == "query":
        query, key = query[..., :0], key[..., :0]
    else:
        value = value[..., :0]
    with pytest.raises(InvalidAttentionInputError, match=name):
        attention(query, key, value)


def transposed(tensor):
    """The same numbers, heads before rows in memory, as a projection that was transposed leaves them."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def last_axis_outermost(tensor):
    return tensor.movedim(-1, 0).contiguous().movedim(0, -1)


def slice_of_a_wider(tensor):
    return torch.cat([tensor, tensor + 1.0], -1)[..., : tensor.shape[-1]]


@pytest.mark.parametrize("order", [transposed, last_axis_outermost, slice_of_a_wider])
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_memory_order_does_not_matter_batched(order, options):
    assert_right(*[order(tensor) for tensor in dense(2, 5, kv_heads=2, seed=8)], **options)


@pytest.mark.parametrize("order", [last_axis_outermost, slice_of_a_wider])
def test_memory_order_does_not_matter_packed(order):
    *tensors, sequences = packed([3, 5, 3], kv_heads=2, seed=9)
    assert_right(*[order(tensor) for tensor in tensors], sequences=sequences)


def test_strides_of_axes_of_size_one_are_never_read():
    query = randn(1, 1, 1, 2, seed=10).transpose(1, 3)
    key = torch.empty_strided((1, 2, 1, 1), (2, 1, 7, 5)).copy_(randn(1, 2, 1, 1, seed=11))
    assert_right(query, key, randn(1, 2, 1, 1, seed=12))


def test_expanded_tensors_are_read_as_expanded():
    query, key, value = dense(1, 5, seed=13)
    assert_right(query.expand(3, -1, -1, -1), key.expand(3, -1, -1, -1), value.expand(3, -1, -1, -1))


@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)])
def test_nothing_to_attend_gives_the_right_empty_shapes(batch, seqlen_q, seqlen_k):
    assert_right(*dense(batch, seqlen_q, seqlen_k, value_head_dim=8, kv_heads=2))
