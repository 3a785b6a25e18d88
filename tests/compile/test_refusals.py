"""What is wrong with a call is said by a compiled one when it runs, as by the call: the same class, the same words."""

import pytest
import torch

from hal_attn import (
    HalAttnError,
    PackedSequences,
    UnsupportedAttentionError,
    attention,
    merge_attention_states,
    varlen_attention,
)
from tests.compile.tracing import Program

Q = torch.randn(1, 7, 4, 16)
P = Q[0]
OFFSETS = torch.tensor([0, 3, 7], dtype=torch.int32)
SEQUENCES = PackedSequences.from_lengths([3, 4])
BATCHED = {
    "a flag": {"causal": 1},
    "a flag of the results": {"return_lse": "yes"},
    "a scale": {"scale": "a"},
    "a scale that is no number": {"scale": float("nan")},
    "a scale on the device": {"scale": torch.tensor(0.5)},
    "a window of floats": {"window_size": (3.0, 0)},
    "a window below -1": {"window_size": (-2, 0)},
    "one edge": {"window_size": [3]},
    "softcap": {"softcap": -1.0},
    "dropout": {"dropout_p": 1.0},
    "no dropout": {"dropout_p": None},
    "a mask of lists": {"mask": [[True]]},
    "a mask of another shape": {"mask": torch.ones(1, 1, 7, 6, dtype=torch.bool)},
    "a mask of two dimensions": {"mask": torch.ones(7, 7, dtype=torch.bool)},
    "padding": {"key_padding_mask": torch.ones(1, 7)},
    "sinks": {"sinks": torch.ones(3)},
    "sinks of a list": {"sinks": [1.0] * 4},
    "slopes": {"alibi_slopes": 0.5},
    "no backend": {"backend": "cpu_mat"},
    "a number for a backend": {"backend": 3},
    "no names": {"backend": []},
    "a backend that refuses": {"backend": "cpu_flash", "softcap": 2.0},
    "a backend of another platform": {"backend": ("flash_attn_3",)},
}
TENSORS = {
    "no value": (Q, Q, None),
    "packed": (P, P, P),
    "one dimension": (Q[0, 0, 0], Q, Q),
    "heads": (Q, Q[:, :, :3], Q[:, :, :3]),
    "head dim": (Q, Q[..., :8], Q),
    "rows": (Q, Q, Q[:, :5]),
    "dtypes": (Q, Q.double(), Q),
    "integers": (Q.long(), Q.long(), Q.long()),
    "batch": (Q, Q.expand(2, -1, -1, -1), Q.expand(2, -1, -1, -1)),
}
PACKED = {
    "nothing": {},
    "a list": {"sequences": [3, 4]},
    "sequences and offsets": {"sequences": SEQUENCES, "cu_seqlens": OFFSETS},
    "sequences and a length": {"sequences": SEQUENCES, "max_seqlen": 4},
    "sequences of other rows": {"sequences": PackedSequences.from_lengths([3, 3])},
    "offsets of other rows": {"cu_seqlens": OFFSETS[:2]},
    "offsets that begin late": {"cu_seqlens": OFFSETS + 1},
    "offsets of a tuple": {"cu_seqlens": (0, 3, 7)},
    "offsets of floats": {"cu_seqlens": OFFSETS.float()},
    "a longest that is short": {"cu_seqlens": OFFSETS, "max_seqlen": 2},
    "a longest that is no whole number": {"cu_seqlens": OFFSETS, "max_seqlen": 4.5},
    "a longest below 0": {"cu_seqlens": OFFSETS, "max_seqlen": -1},
    "host offsets with a float": {"cu_seqlens": OFFSETS, "cu_seqlens_host": (0, 3.0, 7)},
    "host offsets of a text": {"cu_seqlens": OFFSETS, "cu_seqlens_host": "0, 3, 7"},
    "host offsets that fall": {"cu_seqlens": OFFSETS, "cu_seqlens_host": (0, 8, 7)},
    "host offsets of fewer": {"cu_seqlens": OFFSETS, "cu_seqlens_host": torch.tensor([0, 7])},
    "host offsets alone": {"cu_seqlens_host": (0, 3, 7)},
    "key lengths alone": {"cu_seqlens": OFFSETS, "max_seqlen_k": 4},
    "a flag": {"sequences": SEQUENCES, "causal": "yes"},
}
PARTS = {
    "none": ([], []),
    "fewer": ([Q, Q], [Q[..., 0].transpose(1, 2)]),
    "of lists": ([[1.0]], [Q]),
    "of another shape": ([Q], [Q[..., 0]]),
    "of half precision": ([Q], [Q[..., 0].transpose(1, 2).half()]),
    "of one dimension": ([Q[0, 0, 0]], [Q[0, 0, 0]]),
}


def alike(function, *arguments):
    """The error of the compiled function is that of the function; returned."""
    with pytest.raises(HalAttnError) as right:
        function(*arguments)
    with pytest.raises(type(right.value)) as found:
        Program(function)(*arguments)
    assert words(found.value) == words(right.value)
    return found.value


def words(error):
    """Its words; of what is not even a tensor only what it is, because a tracer does not say shapes of others."""
    text = str(error)
    return text.partition("; allowed:")[0] if "; allowed: a " in text else text


def batched(tensors, options):
    return attention(*tensors, **options)


def packed(tensors, options):
    return varlen_attention(*tensors, **options)


@pytest.mark.parametrize("name", BATCHED)
def test_a_batched_call(name):
    alike(batched, (Q, Q, Q), BATCHED[name])


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("name", TENSORS)
def test_its_tensors(name, return_lse):
    alike(batched, TENSORS[name], {"return_lse": return_lse})


@pytest.mark.parametrize("name", PACKED)
def test_a_packed_call(name):
    alike(packed, (P, P, P), PACKED[name])


@pytest.mark.parametrize("name", PARTS)
def test_partial_results(name):
    alike(merge_attention_states, *PARTS[name])


def test_an_error_names_its_argument_and_its_rules():
    assert alike(batched, (Q, Q, Q), {"causal": 1}).argument == "causal"
    error = alike(batched, (Q, Q, Q), {"backend": "cpu_flash", "softcap": 2.0})
    assert isinstance(error, UnsupportedAttentionError)
    assert error.refusals[0][0] == "cpu_flash"


def test_the_rest_of_the_program_does_not_hide_the_error():
    def model(query):
        output, lse = attention(query, query, query, causal="yes", return_lse=True)
        return output.flatten(2) @ torch.ones(64, 3) + lse.sum()

    alike(model, Q)


def test_a_gradient_that_no_backend_has_is_refused_not_dropped():
    def model(query, mask):
        return attention(query, query, query, mask=mask, backend="cpu_flash")

    error = alike(model, Q.clone().requires_grad_(), torch.zeros(1, 1, 7, 7, requires_grad=True))
    assert "mask that requires a gradient" in str(error)
