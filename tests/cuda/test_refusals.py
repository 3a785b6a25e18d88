"""What each backend refuses, by which name and why."""

from dataclasses import replace

import pytest
import torch

from hal_attn import PackedSequences, attention, explain, varlen_attention
from hal_attn.errors import UnsupportedAttentionError
from hal_attn.portable import aten_efficient, aten_flash, flash_attn
from tests.cuda.calls import HALF, SINKS, SLOPES, batched, mask, sequences
from tests.support import randn

F16, F64 = torch.float16, torch.float64


def half(seqlen_q=7, seqlen_k=11, **options):
    return batched(seqlen_q, seqlen_k, **options)


def training(call):
    tensors, options = call
    return tuple(tensor.requires_grad_() for tensor in tensors), options


# (device, backend, call, the rule, words of the reason)
REFUSALS = [
    ("sm90", "flash_attn_3", half(dtype=F16), "dtype", "left out of this build of fa3-fwd"),
    ("sm90", "flash_attn_3", half(window_size=(3, 0)), "window_size", "left out of this build of fa3-fwd"),
    ("sm90", "flash_attn_3", training(half()), "gradients", "left out of this build of fa3-fwd"),
    ("sm90", "flash_attn_3", half(dropout_p=0.1), "dropout_p", "off"),
    ("sm90", "flash_attn_3", half(alibi_slopes=SLOPES), "alibi_slopes", "off"),
    ("sm90", "flash_attn_3", half(head_dim=264), "head_dim", "at most 256"),
    ("sm90,fa3=full", "flash_attn_3", training(half(head_dim=200, deterministic=True)), "deterministic", "192"),
    ("sm90,fa3=full", "flash_attn_3", training(half(return_lse=True)), "return_lse", "gradient"),
    ("sm80,fa3=full", "flash_attn_3", half(), "device", "sm90"),
    ("sm100", "flash_attn_3", half(), "device", "sm90"),
    ("sm90", "flash_attn_4", half(mask=mask()), "mask", "no mask"),
    ("sm90", "flash_attn_4", half(dropout_p=0.1), "dropout_p", "off"),
    ("sm100", "flash_attn_4", half(head_dim=160), "head_dim", "at most 128"),
    ("sm80", "flash_attn_4", half(head_dim=160), "head_dim", "at most 128"),
    ("sm80", "flash_attn_4", half(sinks=SINKS), "sinks", "sm9x"),
    ("sm80", "flash_attn_4", training(half()), "gradients", "inference"),
    ("sm120", "flash_attn_4", training(half(deterministic=True)), "deterministic", "inference"),
    ("sm100", "flash_attn_4", training(half(head_dim=256, softcap=1.0)), "softcap", "256"),
    ("sm90", "torch_cudnn", half(causal=True), "causal", "top-left"),
    ("sm90", "torch_cudnn", half(window_size=(3, 1)), "window_size", "no window"),
    ("sm90", "torch_cudnn", half(deterministic=True), "deterministic", "off"),
    ("sm90", "torch_cudnn", half(softcap=1.0), "softcap", "off"),
    ("sm80", "torch_cudnn", half(head_dim=136), "head_dim", "256 on sm90"),
    ("sm90", "torch_cudnn", training(half(head_dim=136)), "head_dim", "at most 128 with gradients"),
    ("sm90", "torch_cudnn", half(seqlen_q=1, dropout_p=0.1), "dropout_p", "more queries"),
    ("sm90", "flash_attn", half(softcap=1.0, dropout_p=0.1), "softcap", "one of the two"),
    ("sm86", "flash_attn", training(half(head_dim=200)), "head_dim", "at most 192"),
    ("sm90", "flash_attn", half(dtype=F64), "dtype", "bfloat16, float16"),
    ("sm120", "torch_flash", training(half(head_dim=256, dropout_p=0.1)), "head_dim", "at most 192"),
    ("sm90", "torch_flash", training(half(deterministic=True)), "deterministic", "inference"),
    ("sm90", "torch_flash", half(alibi_slopes=SLOPES), "alibi_slopes", "off"),
    ("sm90", "torch_flash", half(softcap=1.0), "softcap", "off"),
    ("sm90", "torch_efficient", half(seqlen_q=11, seqlen_k=7, causal=True), "causal", "as many keys as queries"),
    ("sm90", "torch_efficient", sequences([3, 9], [5, 11], causal=True), "causal", "as many keys as queries"),
    ("sm90", "torch_efficient", half(window_size=(3, 1)), "window_size", "ends at the diagonal"),
    ("sm90", "torch_efficient", training(half(window_size=(3, 0))), "window_size", "forgets the window"),
    ("sm90", "torch_efficient", training(half(deterministic=True)), "deterministic", "inference"),
    ("sm90", "torch_efficient", half(softcap=1.0), "softcap", "off"),
    ("sm90", "flashinfer_cudnn", training(sequences([3, 9])), "gradients", "inference"),
    ("sm90", "flashinfer_cudnn", sequences([3, 9], head_dim=136), "head_dim", "at most 128"),
    ("sm90", "flashinfer_cudnn", sequences([3, 9], window_size=(2, 1)), "window_size", "ends at the diagonal"),
    ("sm90", "flashinfer_cudnn", half(), "hook", "batched"),
]


@pytest.mark.parametrize(("device", "backend", "call", "rule", "words"), REFUSALS)
def test_refused_by_name_with_the_reason(simulate, device, backend, call, rule, words):
    simulate(device)
    tensors, options = call
    candidate = next(c for c in explain(*tensors, **options).considered if c.backend.name == backend)
    reasons = [str(refusal) for refusal in candidate.refusals if refusal.rule == rule]
    assert any(words in reason for reason in reasons), [str(refusal) for refusal in candidate.refusals]


def test_32_bit_offsets_are_refused_where_elements_are_more(simulate):
    simulate()
    query = torch.empty(2**31 // (4 * 128), 4, 128, dtype=HALF, device="meta")
    assert query.numel() == 2**31
    tensors, options = sequences([3, 9], head_dim=128)
    selection = explain(*tensors, **options)
    backend = next(c.backend for c in selection.considered if c.backend.name == "flashinfer_cudnn")
    request = replace(selection.request, tokens_q=query.shape[0])
    assert [str(refusal) for refusal in backend.refusals(request)] == [
        "query: have 2147483648 elements, need fewer than 2^31 elements, its offsets are int32"
    ]
    assert backend.refusals(replace(request, tokens_q=query.shape[0] - 1)) == ()


@pytest.mark.parametrize("call", [half(), training(half()), sequences([3, 9])])
def test_cudnn_refuses_what_32_bits_do_not_count(simulate, call):
    """Padded, where sequences are packed: 400 of 10,496 at most, 4 heads of 128."""
    simulate()
    tensors, options = call
    request = explain(*tensors, **options).request
    backend = next(c.backend for c in explain(*tensors, **options).considered if c.backend.name == "torch_cudnn")
    large = {"heads": 4, "kv_heads": 4, "head_dim": 128, "value_head_dim": 128, "seqlen_q": 10_496, "seqlen_k": 128}

    def rules(batch):
        rows = {} if request.packed else {"tokens_q": batch * 10_496, "tokens_k": batch * 128}
        return [str(found) for found in backend.refusals(replace(request, batch=batch, **large, **rows))]

    assert rules(399) == []
    (reason,) = rules(400)
    assert reason.startswith("query: have 2149580800 elements, need fewer than 2^31 elements")


def test_error_names_every_backend_and_its_rules(simulate):
    simulate()
    tensors, options = sequences([3, 9], softcap=1.0, dropout_p=0.1)
    with pytest.raises(UnsupportedAttentionError) as caught:
        varlen_attention(*tensors, backend=["torch_flash", "flash_attn", "flash_attn_3"], **options)
    text = str(caught.value)
    assert all(name in text for name in ("torch_flash", "flash_attn", "flash_attn_3", "softcap", "dropout_p"))


IN_A_GRID = 65_535
COUNTED = [
    ("torch_flash", half(), "sm90"),
    ("torch_flash", sequences([3, 9]), "sm90"),
    ("torch_efficient", half(), "sm90"),
    ("torch_efficient", sequences([3, 9]), "sm90"),
    ("flash_attn", half(), "sm90"),
    ("flash_attn", sequences([3, 9]), "sm90"),
    ("flash_attn_4", half(), "sm90"),
    ("flash_attn_3", training(half()), "sm90,fa3=full"),
    ("torch_cudnn", training(half()), "sm90"),
]
NOT_COUNTED = [
    ("flash_attn_4", sequences([3, 9]), "sm90"),
    ("flash_attn_3", half(), "sm90"),
    ("flash_attn_3", sequences([3, 9]), "sm90"),
    ("torch_cudnn", half(), "sm90"),
    ("torch_math", training(half()), "sm90"),
]


def with_counts(simulate, backend, call, device, **counts):
    """The rules that refuse a call of so many sequences or heads."""
    simulate(device)
    tensors, options = call
    selection = explain(*tensors, **options)
    found = next(c.backend for c in selection.considered if c.backend.name == backend)
    return [refusal.rule for refusal in found.refusals(replace(selection.request, **counts))]


@pytest.mark.parametrize(("backend", "call", "device"), COUNTED)
@pytest.mark.parametrize("name", ["batch", "heads"])
def test_more_than_a_grid_counts_is_refused(simulate, backend, call, device, name):
    assert with_counts(simulate, backend, call, device, **{name: IN_A_GRID}) == []
    counts = {"heads": IN_A_GRID + 1, "kv_heads": IN_A_GRID + 1} if name == "heads" else {name: IN_A_GRID + 1}
    assert with_counts(simulate, backend, call, device, **counts) == [name]


@pytest.mark.parametrize(("backend", "call", "device"), NOT_COUNTED)
def test_what_counts_them_otherwise_takes_more(simulate, backend, call, device):
    assert with_counts(simulate, backend, call, device, batch=IN_A_GRID + 1) == []


@pytest.mark.parametrize(("dtype", "packing"), [(HALF, False), (torch.float32, False), (torch.float32, True)])
def test_a_call_of_more_is_answered_by_another(simulate, dtype, packing):
    """A query with one key gives its value."""
    simulate()
    count = IN_A_GRID + 1
    shape = (count, 1, 8) if packing else (count, 1, 1, 8)
    query, key, value = (randn(*shape, seed=seed, dtype=dtype).requires_grad_() for seed in range(3))
    if packing:
        output = varlen_attention(query, key, value, sequences=PackedSequences.from_lengths([1] * count))
    else:
        output = attention(query, key, value)
    assert torch.equal(output, value)


@pytest.mark.parametrize("backend", ["torch_flash", "torch_efficient", "flash_attn"])
@pytest.mark.parametrize("packing", [False, True])
def test_the_simulated_kernels_count_as_theirs_do(simulate, monkeypatch, backend, packing):
    """Without the rule, what a real device says."""
    simulate()
    for module in (aten_flash, aten_efficient, flash_attn):
        monkeypatch.setattr(module, "grid_rule", lambda request: ())
    count = IN_A_GRID + 1
    tensor = randn(*((count, 1, 8) if packing else (count, 1, 1, 8)), seed=0, dtype=HALF)
    options = {"sequences": PackedSequences.from_lengths([1] * count)} if packing else {}
    function = varlen_attention if packing else attention
    with pytest.raises(RuntimeError, match="CUDA error: invalid argument"):
        function(tensor, tensor, tensor, backend=backend, **options)
