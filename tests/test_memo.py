"""A call that was bound before is found again for what it was bound for, and for nothing else."""

import pickle
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from hal_attn import PackedSequences, attention, memo, use_backend, varlen_attention
from tests.support import dense, packed

PLAIN = (None, False, 0.0, 0.0, False, False)


@pytest.fixture(autouse=True)
def empty():
    memo.clear()
    yield
    memo.clear()


@pytest.fixture(params=[True, False], ids=["guards", "by equality alone"])
def guards(request, monkeypatch):
    """With PyTorch's guards, and without, as in a release that has none."""
    if not request.param:
        monkeypatch.setattr(memo, "_guards", None)
    assert request.param == (memo._guards is not None)


def bound(tensors, name, *, plain=PLAIN, window=None, backend=None, packed=None, given=None):
    """What the memo gives, `name` where it has to bind."""
    sequences = packed and SimpleNamespace(signature=packed)
    with mock.patch.object(memo, "_bind", return_value=name):
        return memo.bound_call(*tensors, plain, window, backend, given, sequences)


def tensors():
    return dense(2, 5, heads=2, head_dim=8)[:3]


OTHERS = {
    "length": lambda q, k, v: (q[:, :4], k, v),
    "dtype": lambda q, k, v: (q.double(), k.double(), v.double()),
    "one dtype": lambda q, k, v: (q, k.double(), v),
    "gradient": lambda q, k, v: (q, k, v.clone().requires_grad_()),
    "sparse": lambda q, k, v: (q.to_sparse(), k, v),
    "device": lambda q, k, v: (q.to("meta"), k.to("meta"), v.to("meta")),
    "one device": lambda q, k, v: (q, k, v.to("meta")),
    "no tensor": lambda q, k, v: (q, k, v.numpy()),
    "None": lambda q, k, v: (q, k, None),
}


def test_the_same_kind_of_tensors_is_found(guards):
    bound(tensors(), "first")
    assert bound([tensor.clone() for tensor in tensors()], "second") == "first"


@pytest.mark.parametrize("other", OTHERS)
def test_another_kind_of_tensors_is_another_call(guards, other):
    bound(tensors(), "first")
    assert bound(OTHERS[other](*tensors()), "second") == "second"
    assert bound(tensors(), "third") == "first"


def test_strides_and_python_types_make_no_other_call(guards):
    query, key, value = tensors()
    bound((query, key, value), "first")
    assert bound((query.transpose(1, 2).contiguous().transpose(1, 2), key, value), "second") == "first"
    assert bound((torch.nn.Parameter(query, requires_grad=False), key, value), "second") == "first"


@pytest.mark.parametrize(
    "change",
    [
        {"plain": (0.5, *PLAIN[1:])},
        {"plain": (None, 0, *PLAIN[2:])},
        {"plain": (None, True, *PLAIN[2:])},
        {"plain": (*PLAIN[:2], 0, *PLAIN[3:])},
        {"plain": (*PLAIN[:3], False, *PLAIN[4:])},
        {"plain": (*PLAIN[:4], 0, False)},
        {"plain": (*PLAIN[:5], True)},
        {"window": (1, 0)},
        {"window": (1.0, 0)},
        {"window": [1, 0]},
        {"backend": "cpu_math"},
        {"backend": ("cpu_math",)},
        {"backend": ["cpu_math"]},
        {"packed": "some"},
    ],
    ids=str,
)
def test_other_options_are_another_call(guards, change):
    bound(tensors(), "first")
    bound(tensors(), "one, and a window", plain=(1, *PLAIN[1:]), window=(1, 0), backend="cpu_math", packed="other")
    assert bound(tensors(), "second", **change) == "second"
    assert bound(tensors(), "third", **change) == "second"
    assert bound(tensors(), "third") == "first"


def test_a_scale_counts_with_its_type(guards):
    bound(tensors(), "first", plain=(1, *PLAIN[1:]))
    assert bound(tensors(), "second", plain=(True, *PLAIN[1:])) == "second"
    assert bound(tensors(), "third", plain=(1.0, *PLAIN[1:])) == "third"


def test_tensor_options_count_with_their_kind(guards):
    query, key, value = tensors()
    bound((query, key, value), "first", given={"sinks": torch.zeros(2)})
    assert bound((query, key, value), "second") == "second"
    assert bound((query, key, value), "third", given={"sinks": torch.zeros(2).double()}) == "third"
    assert bound((query, key, value), "fourth", given={"sinks": torch.ones(2)}) == "first"


def test_modes_overrides_and_the_environment_are_another_call(guards, monkeypatch):
    bound(tensors(), "first")
    with torch.autocast("cpu"):
        assert bound(tensors(), "autocast") == "autocast"
    with use_backend("cpu_math"):
        assert bound(tensors(), "override") == "override"
    monkeypatch.setenv("HAL_ATTN_BACKEND", "cpu_math")
    assert bound(tensors(), "environment") == "environment"
    monkeypatch.delenv("HAL_ATTN_BACKEND")
    assert bound(tensors(), "again") == "first"


def test_the_mode_of_gradients_is_part_of_the_key(guards):
    query, key, value = tensors()
    leaves = (query.requires_grad_(), key, value)
    with torch.no_grad():
        bound(leaves, "without")
    assert bound(leaves, "with") == "with"
    with torch.no_grad():
        assert bound(leaves, "again") == "without"
    assert bound(leaves, "again") == "with"


def test_kinds_that_take_turns_are_all_found(guards):
    kinds = {f"{length}": dense(2, length, heads=2, head_dim=8)[:3] for length in (3, 4, 5, 6)}
    for _ in range(3):
        assert {name: bound(kind, name) for name, kind in kinds.items()} == {name: name for name in kinds}


def test_what_no_key_can_hold_is_bound_each_time(guards):
    assert bound(tensors(), "first", backend={"cpu_math"}) == "first"
    assert bound(tensors(), "second", backend={"cpu_math"}) == "second"


def test_calls_are_bound_once_and_looked_at_once(guards):
    query, key, value = tensors()
    flat = (query[0], key[0], value[0])

    def both():
        sequences = PackedSequences.from_lengths([2, 3])
        return attention(query, key, value, causal=True), varlen_attention(*flat, sequences=sequences)

    first, forbidden = both(), mock.Mock(side_effect=AssertionError("bound again"))
    with mock.patch.object(memo, "_bind", forbidden):
        second = both()
        if memo._guards is not None:
            with mock.patch.object(memo, "_identity", forbidden):
                both()
    assert all(torch.equal(have, need) for have, need in zip(second, first, strict=True))


def test_one_tensor_as_key_and_value_keeps_the_guards_of_others():
    query, key, value = tensors()
    bound((query, key, value), "first")
    guards = dict(memo._recent)
    assert bound((query, key, key), "second") == "first"
    assert memo._recent == guards


def test_what_layers_share_does_not_grow_with_the_environment(monkeypatch):
    monkeypatch.setenv("HAL_ATTN_SIMULATE", "cuda:sm90")
    *flat, sequences = packed((3, 5), dtype=torch.bfloat16, head_dim=64)
    counts = []
    for number in range(4):
        monkeypatch.setenv(f"SOMETHING_ELSE_{number}", "")
        varlen_attention(*flat, sequences=sequences)
        counts.append(len(sequences._memo))
    assert counts == counts[:1] * 4


def test_sequences_that_a_call_has_used_can_be_pickled(monkeypatch):
    monkeypatch.setenv("HAL_ATTN_SIMULATE", "cuda:sm90")
    *flat, sequences = packed((3, 5), dtype=torch.bfloat16, head_dim=64)
    first = varlen_attention(*flat, sequences=sequences)
    twin = pickle.loads(pickle.dumps(sequences))
    assert torch.equal(varlen_attention(*flat, sequences=twin), first)
