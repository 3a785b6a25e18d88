"""Random requests over every backend that takes them, against the float64 oracle: values, LSE and gradients.

The CPU draws 1,000 requests of each kind, each simulated device fewer; `HYPOTHESIS_PROFILE=long` twice as many.
"""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, note, settings

import hal_attn
from hal_attn import PackedSequences, reference_attention, reference_varlen_attention
from hal_attn.testing.plain import plain_attention
from tests.arguments import simulating

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Requests in a thousand of the profile's, by the device that they are drawn for.
SHARES = {
    "cpu": 1000,
    "cuda:sm90": 150,
    "cuda:sm80": 100,
    "cuda:sm100": 100,
    "rocm:gfx942": 150,
    "rocm:gfx90a": 100,
    "ascend:Ascend910B1": 200,
    "ascend:Ascend910_9391,torch_npu=7.2": 100,
    "ascend:Ascend310P3": 50,
}
TENSORS = ("mask", "key_padding_mask", "sinks", "alibi_slopes")


@st.composite
def shapes(draw):
    kv_heads = draw(st.integers(1, 3))
    head_dim = draw(st.sampled_from([1, 3, 8, 16, 20, 33, 64]))
    return {
        "kv_heads": kv_heads,
        "heads": kv_heads * draw(st.integers(1, 3)),
        "head_dim": head_dim,
        "value_head_dim": draw(st.sampled_from([head_dim, head_dim, 5, 24])),
        "dtype": draw(st.sampled_from(DTYPES)),
        "seed": draw(st.integers(0, 2**31)),
    }


@st.composite
def options(draw):
    """Plain options, and by name whether each tensor option is given."""
    edge = st.one_of(st.just(-1), st.none(), st.integers(0, 12))
    return {
        "scale": draw(st.sampled_from([None, None, 0.0, 0.3, -0.7])),
        "causal": draw(st.booleans()),
        "window_size": draw(st.one_of(st.none(), st.none(), st.tuples(edge, edge))),
        "softcap": draw(st.sampled_from([0.0, 0.0, 0.0, 1.5, 30.0])),
        "sinks": draw(st.sampled_from([False, False, True])),
        "alibi_slopes": draw(st.sampled_from([0, 0, 0, 1, 2])),
        "return_lse": draw(st.booleans()),
        "grad": draw(st.booleans()),
    }


@st.composite
def batched(draw):
    shape, option = draw(shapes()), draw(options())
    shape |= {
        "batch": draw(st.integers(0, 3)),
        "seqlen_q": draw(st.integers(0, 18)),
        "seqlen_k": draw(st.integers(0, 18)),
    }
    if draw(st.booleans()):
        shape["seqlen_k"] = shape["seqlen_q"]
    broadcast = st.tuples(*[st.booleans()] * 4)
    option["mask"] = draw(st.one_of(st.none(), st.none(), st.tuples(st.sampled_from(["bool", "float"]), broadcast)))
    option["key_padding_mask"] = draw(st.sampled_from([False, False, True]))
    return shape, option


@st.composite
def packed(draw):
    shape, option = draw(shapes()), draw(options())
    lengths = draw(st.lists(st.integers(0, 14), max_size=8))
    if draw(st.booleans()):
        lengths_k = lengths
    else:
        lengths_k = draw(st.lists(st.integers(0, 14), min_size=len(lengths), max_size=len(lengths)))
    return shape | {"lengths": lengths, "lengths_k": lengths_k}, option


def draw_tensors(shape, option, rows_q, rows_k, batch, generator):
    """Inputs of the given leading shapes and the tensor options, as float64 values that the dtype holds exactly."""
    dtype, heads = shape["dtype"], shape["heads"]

    def normal(*size, of=dtype):
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(of)

    inputs = {
        "query": normal(*rows_q, heads, shape["head_dim"]),
        "key": normal(*rows_k, shape["kv_heads"], shape["head_dim"]),
        "value": normal(*rows_k, shape["kv_heads"], shape["value_head_dim"]),
    }
    given = {}
    if option["sinks"]:
        given["sinks"] = normal(heads, of=torch.float32)
    if option["alibi_slopes"]:
        given["alibi_slopes"] = normal(*(batch, heads)[2 - option["alibi_slopes"] :], of=torch.float32).abs() * 0.2
    if option.get("mask"):
        kind, keep = option["mask"]
        full = (batch, heads, rows_q[-1], rows_k[-1])
        size = [n if kept else 1 for n, kept in zip(full, keep, strict=True)]
        given["mask"] = normal(*size)
        hidden = torch.rand(size, generator=generator) < 0.3
        given["mask"] = ~hidden if kind == "bool" else given["mask"].masked_fill(hidden, -torch.inf)
    if option.get("key_padding_mask"):
        given["key_padding_mask"] = torch.rand(batch, rows_k[-1], generator=generator) < 0.7
    if option["grad"]:
        for tensor in (*inputs.values(), *given.values()):
            if tensor.is_floating_point():
                tensor.requires_grad_()
    return inputs, given


def check(name, got, exact, plain, unit, least=0.0):
    """Rule 12: at most twice the error of plain PyTorch plus `unit` of the largest value, of at least `least`."""
    assert got.shape == exact.shape, name
    infinite = torch.isinf(exact)
    assert torch.equal(got.double()[infinite], exact[infinite]), f"{name}: infinities differ"
    finite = ~infinite
    if not finite.any():
        return
    error = (got.double() - exact)[finite].abs().max().item()
    allowed = 2 * (plain.double() - exact)[finite].abs().max().item()
    allowed += unit * max(exact[finite].abs().max().item(), least)
    assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def ulp(dtype):
    """One unit in the last place; float32 sums in another order differ by a few although plain PyTorch happened to be
    exact, and in float64 the oracle rounds as much as what it judges."""
    return torch.finfo(dtype).eps * {torch.float32: 4, torch.float64: 32}.get(dtype, 1)


def gradients(output, lse, tensors, generator):
    """Gradients of a weighted sum; the weights are quarters, so every dtype passes them back unrounded."""
    loss = (output.double() * torch.randint(-4, 5, output.shape, generator=generator) / 4).sum()
    if lse is not None:
        weight = torch.randint(-4, 5, lse.shape, generator=generator) / 4
        loss = loss + (lse.double().masked_fill(torch.isinf(lse), 0.0) * weight).sum()
    if not loss.requires_grad:
        return [torch.zeros_like(tensor, dtype=torch.float64) for tensor in tensors]
    found = torch.autograd.grad(loss, tensors, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(tensors, found, strict=True)]


def compare(call, oracle, plain, inputs, given_tensors, option, dtype):
    """Every backend that takes the request gives the oracle's answer; at least one takes it."""
    lse_wanted = option["return_lse"]
    exact, exact_lse = oracle()
    rough, rough_lse = plain()
    wanted = {name: t for name, t in (inputs | given_tensors).items() if t.requires_grad}
    # A gradient is a sum of terms that may cancel, so its unit is one of at least a term: about 1, and for a slope a
    # distance.
    longest = max(inputs["query"].shape[-3], inputs["key"].shape[-3])
    terms = {name: float(longest) if name == "alibi_slopes" else 1.0 for name in wanted}

    def grads(output, lse):
        return gradients(output, lse if lse_wanted else None, list(wanted.values()), torch.Generator().manual_seed(1))

    exact_grads, rough_grads = (grads(exact, exact_lse), grads(rough, rough_lse)) if wanted else ([], [])
    taken = 0
    considered = {backend.name: refusals for backend, refusals in call(None).considered}
    for name, refusals in considered.items():
        if refusals:
            continue
        taken += 1
        result = call(name)
        output, lse = result if lse_wanted else (result, None)
        assert output.dtype == dtype
        check(f"{name} output", output, exact, rough, ulp(dtype))
        if lse is not None:
            assert lse.dtype == torch.float32
            check(f"{name} lse", lse, exact_lse, rough_lse, ulp(torch.float32))
        found = grads(output, lse) if wanted else []
        for of, got, want, near in zip(wanted, found, exact_grads, rough_grads, strict=bool(wanted)):
            assert torch.isfinite(got).all(), f"{name} gradient of {of} is not finite"
            unit = 8 * max(ulp(dtype), ulp(got.dtype))
            check(f"{name} gradient of {of}", got, want, near, unit, least=terms[of])
    rules = {refusal.rule for refusals in considered.values() for refusal in refusals}
    assert taken or "dtype" in rules, "the plain backend takes every request in a dtype of its platform"


@pytest.mark.parametrize("platform", SHARES)
@pytest.mark.parametrize("kind", ["batched", "packed"])
def test_requests_equal_the_oracle(platform, kind):
    strategy, check_case = {"batched": (batched(), check_batched), "packed": (packed(), check_packed)}[kind]
    examples = max(1, settings.default.max_examples * SHARES[platform] // 1000)
    with simulating(platform):
        settings(max_examples=examples)(given(strategy)(check_case))()


def check_batched(case):
    shape, option = case
    batch, seqlen_q, seqlen_k = shape["batch"], shape["seqlen_q"], shape["seqlen_k"]
    generator = torch.Generator().manual_seed(shape["seed"])
    inputs, tensors = draw_tensors(shape, option, (batch, seqlen_q), (batch, seqlen_k), batch, generator)
    plain_options = {name: option[name] for name in ("scale", "causal", "window_size", "softcap")}
    arguments = {**plain_options, **tensors}

    def call(backend):
        if backend is None:
            return hal_attn.explain(*inputs.values(), **arguments, return_lse=option["return_lse"])
        return hal_attn.attention(*inputs.values(), **arguments, return_lse=option["return_lse"], backend=backend)

    def plain():
        if not (batch and seqlen_q and seqlen_k):
            return reference_attention(*inputs.values(), **arguments)
        return plain_attention(*inputs.values(), **arguments)

    note(f"{call(None)}")
    compare(
        call, lambda: reference_attention(*inputs.values(), **arguments), plain, inputs, tensors, option, shape["dtype"]
    )


def check_packed(case):
    shape, option = case
    lengths, lengths_k = shape["lengths"], shape["lengths_k"]
    generator = torch.Generator().manual_seed(shape["seed"])
    sequences = PackedSequences.from_lengths(lengths, lengths_k)
    inputs, tensors = draw_tensors(shape, option, (sum(lengths),), (sum(lengths_k),), len(lengths), generator)
    arguments = {**{name: option[name] for name in ("scale", "causal", "window_size", "softcap")}, **tensors}

    def call(backend):
        extra = {"sequences": sequences, "return_lse": option["return_lse"]}
        if backend is None:
            return hal_attn.explain(*inputs.values(), **arguments, **extra)
        return hal_attn.varlen_attention(*inputs.values(), **arguments, **extra, backend=backend)

    def plain():
        parts = [t.split(list(n)) for t, n in zip(inputs.values(), (lengths, lengths_k, lengths_k), strict=True)]
        outputs, lses = [], []
        for index, rows in enumerate(zip(*parts, strict=True)):
            own = dict(arguments)
            if option["alibi_slopes"] == 2:
                own["alibi_slopes"] = arguments["alibi_slopes"][index]
            run = plain_attention if lengths[index] and lengths_k[index] else reference_attention
            output, lse = run(*(part[None] for part in rows), **own)
            outputs.append(output[0].double())
            lses.append(lse[0].double())
        if not outputs:
            return reference_varlen_attention(*inputs.values(), sequences, **arguments)
        return torch.cat(outputs), torch.cat(lses, 1)

    note(f"{call(None)}")
    oracle = lambda: reference_varlen_attention(*inputs.values(), sequences, **arguments)  # noqa: E731
    compare(call, oracle, plain, inputs, tensors, option, shape["dtype"])


def test_the_yardstick_sees_a_wrong_scale():
    """The tolerance is tight enough that one percent on the scale does not pass."""
    query, key, value = (torch.randn(1, 8, 2, 16, generator=torch.Generator().manual_seed(n)) for n in range(3))
    exact, _ = reference_attention(query, key, value)
    rough, _ = plain_attention(query, key, value)
    wrong = hal_attn.attention(query, key, value, scale=1.01 / math.sqrt(16))
    with pytest.raises(AssertionError, match="error"):
        check("output", wrong, exact, rough, ulp(torch.float32))
