"""Each refusal of an Ascend backend, with its reason."""

from types import SimpleNamespace

import pytest
import torch
from hal_attn_ascend.platform import AscendPlatform

from hal_attn import PackedSequences, UnsupportedAttentionError, attention, explain, varlen_attention
from tests.support import dense, packed, randn

HALF = {"dtype": torch.float16}


def reasons(backend, inputs, **options):
    considered = explain(*inputs, **options).considered
    return {
        refusal.rule: str(refusal) for found, refusals in considered if found.name == backend for refusal in refusals
    }


@pytest.mark.parametrize(
    ("backend", "generation", "shape", "options", "rule", "words"),
    [
        ("ascend_fa", "Ascend910B1", {}, {"softcap": 1.0}, "softcap", "1.0"),
        ("ascend_fa", "Ascend910B1", {}, {"alibi_slopes": torch.ones(4)}, "alibi_slopes", "given"),
        ("ascend_fa", "Ascend910B1", {}, {"deterministic": True}, "deterministic", "off"),
        ("ascend_fa", "Ascend910B1", {}, {"mask": torch.zeros(1, 1, 5, 5)}, "mask", "float16"),
        ("ascend_fa", "Ascend910B1", {"head_dim": 769}, {}, "head_dim", "at most 768"),
        ("ascend_fa", "Ascend910B1", {"heads": 257}, {}, "heads", "at most 256"),
        ("ascend_fa", "Ascend310P3", {}, {}, "device", "Ascend310P3"),
        ("ascend_pfa", "Ascend910B1", {}, {}, "device", "310P"),
        ("ascend_pfa", "Ascend310P3", {"dtype": torch.float32}, {}, "dtype", "float16"),
        ("ascend_pfa", "Ascend310P3", {"head_dim": 513}, {}, "head_dim", "at most 512"),
        ("ascend_pfa", "Ascend310P3", {"batch": 129}, {}, "batch", "at most 128"),
        ("ascend_pfa", "Ascend310P3", {"seqlen_q": 1, "seqlen_k": 65536, "batch": 1}, {}, "length", "at most 65535"),
        ("ascend_pfa", "Ascend310P3", {"heads": 257}, {}, "heads", "at most 256"),
        ("ascend_pfa", "Ascend310P3", {"heads": 256, "head_dim": 256}, {}, "heads * head_dim", "at most 65534"),
        ("ascend_pfa", "Ascend310P3", {}, {"return_lse": True}, "return_lse", "return_lse=False"),
        ("ascend_pfa", "Ascend310P3", {}, {"sinks": torch.ones(4)}, "sinks", "off"),
        ("ascend_pfa", "Ascend310P3", {}, {"mask": torch.ones(1, 4, 1, 5).bool()}, "mask", "for all heads"),
        ("ascend_pfa", "Ascend310P3", {}, {"mask": torch.zeros(1, 1, 5, 5).half()}, "mask", "bool"),
        ("ascend_sdpa", "Ascend910B1", {}, {"causal": True, "scale": 0.0}, "scale", "above 0"),
        ("ascend_sdpa", "Ascend910B1", {}, {"deterministic": True}, "deterministic", "off"),
        ("ascend_math", "Ascend910B1", {}, {"deterministic": True}, "deterministic", "use_deterministic_algorithms"),
        ("ascend_math", "Ascend910B1", {"dtype": torch.float64}, {}, "dtype", "float64"),
        ("ascend_math", "Ascend310P3", {"dtype": torch.bfloat16}, {}, "dtype", "bfloat16 on Ascend310P3"),
    ],
)
def test_refusal(simulate, backend, generation, shape, options, rule, words):
    simulate(generation)
    inputs = dense(**{"batch": 2, "seqlen_q": 5, **HALF, **shape})
    assert words in reasons(backend, inputs, **options)[rule]
    with pytest.raises(UnsupportedAttentionError, match=rule.replace("*", r"\*")):
        attention(*inputs, backend=backend, **options)


def test_one_limit_is_no_refusal_where_another_operator_has_none(simulate):
    """Packed, the training operator takes 1024 sequences, the inference operator 4096."""
    simulate()
    query, key, value, sequences = packed([2] * 1025, heads=1, head_dim=64, **HALF)
    assert not reasons("ascend_fa", (query, key, value), sequences=sequences, causal=True)
    assert "at most 1024" in reasons("ascend_fa", (query, key, value), sequences=sequences)["batch"]
    varlen_attention(query, key, value, sequences=sequences, causal=True, backend="ascend_fa")
    query.requires_grad_()
    assert "at most 1024" in reasons("ascend_fa", (query, key, value), sequences=sequences, causal=True)["batch"]


@pytest.mark.parametrize(
    ("generation", "dtype", "hint"),
    [
        ("Ascend910B1", torch.float64, "tensor.float()"),
        ("Ascend310P3", torch.float64, "tensor.float()"),
        ("Ascend310P3", torch.bfloat16, "tensor.half()"),
    ],
)
def test_what_no_backend_of_the_platform_can_do(simulate, generation, dtype, hint):
    platform = simulate(generation)
    (rule,) = platform.validate(explain(*dense(dtype=dtype)).request)
    assert rule.rule == "dtype"
    assert hint in rule.hint
    assert not platform.validate(explain(*dense(dtype=torch.float16)).request)


def test_the_device_is_asked_once_for_its_name(monkeypatch):
    asked = []
    runtime = SimpleNamespace(get_device_name=lambda index: asked.append(index) or "Ascend910B2")
    monkeypatch.setattr(torch, "npu", runtime, raising=False)
    platform = AscendPlatform()
    assert {platform.architecture(torch.device("meta", 1)) for _ in range(3)} == {"Ascend910B2"}
    assert asked == [1]


def test_a_mask_or_slopes_that_want_gradients(simulate):
    simulate()
    inputs = dense(**HALF)
    mask = randn(1, 1, 5, 5, seed=1, **HALF).requires_grad_()
    assert "mask that requires a gradient" in reasons("ascend_fa", inputs, mask=mask)["gradients"]
    assert not reasons("ascend_math", inputs, mask=mask)


def test_an_lse_whose_gradient_may_be_wanted(simulate):
    simulate()
    inputs = [tensor.requires_grad_() for tensor in dense(**HALF)]
    assert "no gradients" in reasons("ascend_fa", inputs, return_lse=True)["return_lse"]


def test_sinks_with_gradients_need_a_release_that_has_sinks(simulate, release):
    simulate(torch_npu=release)
    inputs = [tensor.requires_grad_() for tensor in dense(**HALF)]
    found = reasons("ascend_fa", inputs, sinks=torch.ones(4))
    assert ("torch-npu 7.3" in found.get("sinks", "")) == (release in ("7.0", "7.2"))


def test_math_repeats_in_deterministic_mode(simulate):
    simulate()
    torch.use_deterministic_algorithms(True)
    try:
        assert not reasons("ascend_math", dense(**HALF), deterministic=True)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("most", "options"), [(1024, {}), (4096, {"causal": True})])
def test_the_most_packed_sequences_of_each_operator(simulate, calls, most, options):
    simulate()
    for count in (most, most + 1):
        *rows, sequences = packed([1] * (count - 1) + [2], heads=1, head_dim=64, **HALF)
        found = reasons("ascend_fa", rows, sequences=sequences, **options)
        assert found == {} if count == most else "at most 1024" in found["batch"]
    *rows, sequences = packed([1] * (most - 1) + [2], heads=1, head_dim=64, **HALF)
    varlen_attention(*rows, sequences=sequences, backend="ascend_fa", **options)
    assert [len(call["actual_seq_qlen"]) for call in calls] == [most]


def test_a_maximum_beyond_all_rows_is_no_limit(simulate):
    simulate()
    offsets = torch.tensor([0, 3, 7], dtype=torch.int32)
    bound = PackedSequences.from_device_offsets(offsets, offsets, 2**20 + 1, 2**20 + 1)
    rows = packed([3, 4], **HALF)[:3]
    assert not reasons("ascend_fa", rows, sequences=bound)


@pytest.mark.parametrize("host", [None, (0, 3, 3, 7)])
def test_a_hook_called_by_hand_refuses_empty_sequences(simulate, host):
    backend = simulate().backends()[0]
    rows = (tensor[0] for tensor in dense(1, 7, **HALF))
    offsets = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"sequence 1 with 0 queries and 0 keys.*varlen_attention"):
        backend.forward_varlen(*rows, cu_seqlens=offsets, max_seqlen=4, cu_seqlens_host=host)
