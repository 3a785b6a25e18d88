"""The operators by PyTorch's own rules for them, and the tape that joins their passes."""

import gc
import weakref

import pytest
import torch

from hal_attn import PackedSequences, UnsupportedAttentionError, attention, tape
from hal_attn.carrier import carried_by, carry
from hal_attn.operators import ATTENTION, OPERATORS, VARLEN_ATTENTION
from tests.compile.cases import BATCHED, PACKED, batched, packed
from tests.compile.tracing import Program, forgetful, gradients, leaves, same
from tests.support import CPU_BACKENDS

PLAIN = {
    "scale": None,
    "causal": False,
    "left": -1,
    "right": -1,
    "softcap": 0.0,
    "dropout_p": 0.0,
    "deterministic": False,
    "return_lse": False,
    "backend": None,
}


def arguments(operator, given, options, wanted):
    """The arguments of an operator by position."""
    options = dict(options)
    left, right = options.pop("window_size", None) or (-1, -1)
    by_name = {**PLAIN, **options, "left": left, "right": -1 if right is None else right, **given, "wanted": wanted}
    return tuple(by_name.get(name) for name in operator.names)


def called(operator):
    return getattr(torch.ops.hal_attn, operator.name).default


def check_both(operator, given, options):
    """`torch.library.opcheck` of the forward and of the backward operator."""
    given = {name: leaves(tensor)[0] if isinstance(tensor, torch.Tensor) else tensor for name, tensor in given.items()}
    wanted = [isinstance(given.get(name), torch.Tensor) and given[name].requires_grad for name in operator.tensors]
    passed = arguments(operator, given, options, wanted)
    torch.library.opcheck(called(operator), passed)
    detached = {n: t.detach() if isinstance(t, torch.Tensor) else t for n, t in given.items()}
    torch.library.opcheck(called(operator), arguments(operator, detached, options, [False] * len(wanted)))
    results = [result.detach() for result in called(operator)(*passed)]
    backward = getattr(torch.ops.hal_attn, f"{operator.name}_backward").default
    of_lse = torch.ones_like(results[1]) if options.get("return_lse") else None
    passed = arguments(operator, detached, options, wanted)
    torch.library.opcheck(backward, (torch.ones_like(results[0]), of_lse, *passed, *results))


@pytest.mark.parametrize("name", BATCHED)
def test_the_batched_operators(name):
    made, options, tensors = batched(name, 6)
    check_both(ATTENTION, {**dict(zip(("query", "key", "value"), made, strict=True)), **tensors}, options)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_the_batched_operators_on_each_backend_and_layout(backend):
    made = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in batched("causal", 6)[0]]
    given = dict(zip(("query", "key", "value"), made, strict=True))
    check_both(ATTENTION, given, {"causal": True, "backend": [backend]})


@pytest.mark.parametrize("lengths_k", [None, [4, 1, 2]])
@pytest.mark.parametrize("name", PACKED)
def test_the_packed_operators(name, lengths_k):
    made, sequences, options, tensors = packed(name, [3, 0, 5], lengths_k)
    given = {**dict(zip(("query", "key", "value"), made, strict=True)), **tensors}
    check_both(VARLEN_ATTENTION, {**given, "sequences": sequences.carrier}, options)


@pytest.mark.parametrize(
    "places",
    [
        {"max_seqlen": 5},
        {"cu_seqlens_host": [0, 3, 8], "cu_seqlens_k": torch.tensor([0, 4, 8]), "max_seqlen_k": 4},
        {"cu_seqlens_host_tensor": torch.tensor([0, 3, 8]), "max_seqlen_tensor": torch.tensor(5)},
    ],
    ids=["device", "host", "tensors"],
)
def test_the_packed_operators_by_offsets(places):
    made, sequences, options, _ = packed("causal", [3, 5])
    given = dict(zip(("query", "key", "value"), made, strict=True))
    check_both(VARLEN_ATTENTION, {**given, "cu_seqlens": sequences.cu_seqlens, **places}, options)


def test_every_operator_is_checked_here():
    assert set(OPERATORS) == {ATTENTION, VARLEN_ATTENTION}


# Memory: a compiler gives away what it believes dead


def block(x, weight):
    """Attention over tensors that are larger than what they are made of, so that a compiler makes them again."""
    query, key, value = (x.unsqueeze(-1) * row for row in weight)
    output = attention(query.cos() + 1, key.sin() * 2, value.tanh(), causal=True)
    return (output.sum(-1) + x).tanh()


def two_blocks(x, weight):
    return block(block(x, weight) / 8, weight)


def inputs_of_block():
    generator = torch.Generator().manual_seed(0)
    return leaves(torch.randn(2, 9, 4, generator=generator), torch.randn(3, 16, generator=generator))


@pytest.mark.parametrize("backend", [None, *CPU_BACKENDS])
def test_gradients_do_not_depend_on_memory_that_the_compiler_gave_away(backend, monkeypatch):
    if backend is not None:
        monkeypatch.setenv("HAL_ATTN_BACKEND", backend)
    inputs = inputs_of_block()
    found = gradients(Program(two_blocks, backend=forgetful)(*inputs), inputs)
    torch.testing.assert_close(found, gradients(two_blocks(*inputs), inputs))


def test_a_tape_that_kept_the_inputs_would_be_found(monkeypatch):
    """The test above can fail: with tensors of the program kept in the graph, the gradients are not even numbers."""
    monkeypatch.setattr(tape._Saved, "let_go", lambda self, known: None)
    inputs = inputs_of_block()
    found = gradients(Program(two_blocks, backend=forgetful)(*inputs), inputs)
    assert any(not torch.isfinite(gradient).all() for gradient in found)


def test_an_input_that_was_made_again_in_another_layout():
    query, key, value = leaves(*(torch.randn(2, 4, 6, 16).transpose(1, 2) for _ in range(3)))
    output, tape_of = tape.record(lambda t: (attention(*t, causal=True),), (query, key, value), [True] * 3)
    again = [tensor.detach().contiguous() for tensor in (query, key, value)]
    assert again[0].stride() != query.stride()
    grad = torch.randn_like(output[0])
    found = tape_of.gradients([grad], again, output)
    right = torch.autograd.grad(attention(query, key, value, causal=True), (query, key, value), grad)
    same(tuple(found), right)


class Keeps(torch.autograd.Function):
    """Saves views of its inputs that are no view of one of them alone, and one of another dtype."""

    @staticmethod
    def forward(ctx, fused, first):
        ctx.save_for_backward(fused.detach().as_strided((fused.numel(),), (1,)), first.view(torch.int32))
        return fused * first.sum()

    @staticmethod
    def backward(ctx, grad):
        whole, bits = ctx.saved_tensors
        return grad * bits.view(torch.float32).sum(), (grad * whole.view_as(grad)).sum().expand(bits.shape)


def test_what_cannot_be_found_in_the_inputs_again_is_copied():
    fused = torch.randn(6)
    first = torch.randn(4)
    right_inputs = leaves(fused, first)
    right = torch.autograd.grad(Keeps.apply(*right_inputs).sum(), right_inputs)
    (output,), tape_of = tape.record(lambda t: (Keeps.apply(*t),), (fused, first), [True, True])
    again = fused.clone(), first.clone()
    fused.fill_(torch.nan)
    first.fill_(torch.nan)
    same(tuple(tape_of.gradients([torch.ones(6)], again, (output,))), right)


@pytest.mark.parametrize("sides", [(0, 1, 2), (2, 1, 0)])
def test_parts_of_one_buffer_are_told_apart(sides):
    fused = torch.randn(5, 3, 2, 4)
    parts = [fused[:, side] for side in sides]
    layouts = [tape._Layout.of(part) for part in parts]
    for index, part in enumerate(parts):
        for view in (part, part[1:3], part.transpose(0, 1), part[..., 2:], part[None], part.flatten(1)[:, 3:5]):
            holding = [place for place, layout in enumerate(layouts) if layout.holds(tape._Layout.of(view))]
            assert holding == [index]
    assert not any(layout.holds(tape._Layout.of(fused)) for layout in layouts)


# The life of a tape


@pytest.fixture
def tapes(monkeypatch):
    """Weak references to the tapes that are made."""
    made = []
    begin = tape.Tape.__init__

    def init(self, *arguments):
        begin(self, *arguments)
        made.append(weakref.ref(self))

    monkeypatch.setattr(tape.Tape, "__init__", init)
    gc.disable()
    yield made
    gc.enable()


def alive(tapes):
    return sum(reference() is not None for reference in tapes)


def test_a_tape_lives_from_the_forward_to_the_backward_pass(tapes):
    program, inputs = Program(two_blocks), inputs_of_block()
    result = program(*inputs)
    assert alive(tapes) == len(tapes) == 2
    gradients(result, inputs)
    assert alive(tapes) == 0
    del result
    result = program(*inputs)
    assert alive(tapes) == 2
    del result
    assert alive(tapes) == 0


def test_inference_has_no_tape(tapes):
    program, inputs = Program(two_blocks), inputs_of_block()
    with torch.no_grad():
        program(*inputs)
    program(*(tensor.detach() for tensor in inputs))
    assert not tapes


def test_a_backward_pass_may_run_twice():
    inputs = inputs_of_block()
    loss = Program(two_blocks)(*inputs).sum()
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    same(torch.autograd.grad(loss, inputs), first)


def test_the_forward_pass_runs_once(tapes, monkeypatch):
    from hal_attn import functional

    calls = []
    once = functional.attention
    monkeypatch.setattr(functional, "attention", lambda *a, **o: calls.append(1) or once(*a, **o))
    inputs = inputs_of_block()
    gradients(Program(two_blocks)(*inputs), inputs)
    assert len(calls) == 2


def test_saved_tensors_that_are_copied_lose_the_tape_and_no_gradient(tapes):
    inputs = inputs_of_block()
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        result = Program(two_blocks)(*inputs)
    assert alive(tapes) == 0
    same(gradients(result, inputs), gradients(two_blocks(*inputs), inputs))


def test_a_lost_tape_of_dropout_is_refused():
    def dropped(query, key, value):
        return attention(query, key, value, dropout_p=0.5)

    inputs = leaves(*batched("plain")[0])
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        result = Program(dropped)(*inputs)
    with pytest.raises(UnsupportedAttentionError, match="lost before its backward pass"):
        result.sum().backward()


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("outside", [False, True], ids=["checkpoint inside", "checkpoint around"])
def test_activation_checkpointing(outside, dropout_p):
    def layer(x, weight):
        query, key, value = (x.unsqueeze(-1) * row for row in weight)
        return attention(query.sin(), key, value, causal=True, dropout_p=dropout_p).sum(-1).cos()

    def inside(x, weight):
        return torch.utils.checkpoint.checkpoint(layer, x, weight, use_reentrant=False)

    inputs = inputs_of_block()
    torch.manual_seed(1)
    right = gradients(inside(*inputs), inputs)
    torch.manual_seed(1)
    if outside:
        result = torch.utils.checkpoint.checkpoint(Program(layer), *inputs, use_reentrant=False)
    else:
        result = Program(inside)(*inputs)
    torch.testing.assert_close(gradients(result, inputs), right)


def test_a_carrier_carries_through_views_and_not_through_copies():
    thing = Program
    tensor = carry(thing)
    assert carried_by(tensor) is carried_by(tensor.detach()) is carried_by(tensor.view(1, 1)) is thing
    assert carried_by(tensor.clone()) is None
    assert carried_by(torch.zeros(1)) is None
    with torch.inference_mode():
        assert not carry(thing).is_inference()
    with torch.device("meta"):
        assert carry(thing).device.type == "cpu"


def test_a_reference_leads_to_its_thing_while_that_lives():
    sequences = PackedSequences.from_lengths([3, 5])
    tensor = sequences.carrier
    assert carried_by(tensor) is carried_by(tensor.clone())
    assert carried_by(tensor).cu_seqlens_host == (0, 3, 8)
    copied = tensor.clone()
    del sequences, tensor
    assert carried_by(copied) is None


def test_sequences_that_are_gone_are_refused():
    made, sequences, _, _ = packed("plain", [3, 5])
    copied = sequences.carrier.clone()
    del sequences
    given = {**dict(zip(("query", "key", "value"), made, strict=True)), "sequences": copied}
    with pytest.raises(ValueError, match="sequences: got some that are gone"):
        called(VARLEN_ATTENTION)(*arguments(VARLEN_ATTENTION, given, {}, [False] * 5))
