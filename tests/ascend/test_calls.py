"""What reaches the operators: nothing left to a vendor's default, no mask of Sq * Sk, one call for a packed batch."""

import pytest
import torch
from hal_attn_ascend.generations import Generation, generation_of
from hal_attn_ascend.metadata import AscendMetadataBuilder

from hal_attn import attention, varlen_attention
from tests.support import dense, packed, randn

FUSION = "npu_fusion_attention"
FIRST = "npu_fused_infer_attention_score"
SECOND = "npu_fused_infer_attention_score_v2"
PROMPT = "npu_prompt_flash_attention"
INCREMENT = "npu_incre_flash_attention"
SCALE = {FUSION: "scale", FIRST: "scale", SECOND: "softmax_scale", PROMPT: "scale_value", INCREMENT: "scale_value"}
HEADS = {FUSION: "head_num", FIRST: "num_heads", SECOND: "num_query_heads", PROMPT: "num_heads", INCREMENT: "num_heads"}
BANDS = ({"causal": True}, {"causal": True, "window_size": (20, 0)}, {"window_size": (20, 5)})
HALF = {"dtype": torch.float16}


def run(inputs, wants_grad=False, **options):
    inputs = tuple(tensor.requires_grad_(wants_grad) for tensor in inputs[:3])
    function = varlen_attention if "sequences" in options else attention
    return function(*inputs, **options)


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("generation", ["Ascend910B1", "Ascend910_9391", "Ascend950DT", "Ascend310P3"])
def test_scale_and_heads_are_always_given(simulate, calls, generation, release, scale):
    simulate(generation, torch_npu=release)
    for shape in ({"seqlen_q": 5}, {"seqlen_q": 1, "seqlen_k": 6}, {"seqlen_q": 5, "head_dim": 13}):
        for options in ({}, {"causal": True}, {"mask": torch.ones(1, 1, 1, 1, dtype=torch.bool)}):
            dim = shape.get("head_dim", 16)
            calls.clear()
            run(dense(2, heads=4, **shape, **HALF), scale=scale, **options)
            assert calls
            for call in calls:
                assert call[HEADS[call.name]] == 4
                assert call[SCALE[call.name]] == pytest.approx(dim**-0.5 if scale is None else scale)
                assert {SCALE[call.name], HEADS[call.name], "input_layout"} <= call.given


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("generation", ["Ascend910B1", "Ascend950DT"])
def test_a_band_is_one_small_triangle_for_all_calls(simulate, calls, generation, band):
    simulate(generation)
    batched = dense(1, 50, 300, heads=1, **HALF)
    *rows, sequences = packed([50, 30], [300, 30], heads=1, head_dim=64, **HALF)
    for wants_grad in (False, True):
        run(batched, wants_grad, **band)
        run(rows, wants_grad, sequences=sequences, **band)
    masks = [call["atten_mask"] for call in calls]
    assert {tuple(mask.shape) for mask in masks} == {(2048, 2048)}
    assert len({mask.data_ptr() for mask in masks}) == 1
    assert len(calls) == 4


def test_no_band_no_mask(simulate, calls):
    simulate()
    *rows, sequences = packed([5, 3], **HALF)
    run(dense(1, 50, 300, **HALF))
    run(rows, sequences=sequences)
    assert [call["atten_mask"] for call in calls] == [None, None]


def test_a_triangle_made_in_inference_mode_serves_training(simulate):
    backend = simulate("Ascend910_9391").backends()[0]
    backend._triangles.clear()
    with torch.inference_mode():
        run(dense(1, 5, **HALF), causal=True)
    run(dense(1, 5, **HALF), True, causal=True).sum().backward()


@pytest.mark.parametrize("wants_grad", [False, True])
def test_rows_without_keys_are_made_valid_where_there_are_any(simulate, calls, wants_grad):
    simulate()
    for lengths in ((5, 5), (7, 5), (1, 5)):
        for options in ({"causal": True}, {"window_size": (2, 0)}):
            run(dense(1, *lengths, **HALF), wants_grad, **options)
    for lengths in ([5, 2], [5, 9]):
        *rows, sequences = packed(lengths, [5, 8], **HALF)
        run(rows, wants_grad, sequences=sequences, causal=True)
    assert [call["inner_precise"] for call in calls] == [0, 0, 2, 2, 0, 0, 0, 2]


def test_310p_gets_masks_of_2048_queries_at_most(simulate, calls):
    simulate("Ascend310P3")
    inputs = dense(1, 2050, 2053, heads=1, head_dim=16, **HALF)
    for options in ({"causal": True}, {"causal": True, "window_size": (40, 0)}):
        output = run(inputs, backend="ascend_pfa", **options)
        right = run(inputs, backend="ascend_math", **options)
        torch.testing.assert_close(output, right, rtol=2e-3, atol=2e-3)
    assert [tuple(call["atten_mask"].shape[2:]) for call in calls] == [(2048, 2051), (2, 2053), (2048, 2051), (2, 42)]
    assert {call["next_tokens"] for call in calls} == {2**31 - 1}


@pytest.mark.parametrize(
    ("operator", "shape", "options"),
    [
        (SECOND, {}, {}),
        (SECOND, {}, {"causal": True}),
        (SECOND, {"seqlen_q": 1, "seqlen_k": 9}, {"window_size": (2, 0)}),
        (SECOND, {"value_head_dim": 40, "head_dim": 9}, {"return_lse": True}),
        (FUSION, {"dtype": torch.float32}, {}),
        (FUSION, {}, {"dropout_p": 0.5}),
        (FUSION, {}, {"mask": torch.ones(1, 1, 5, 5, dtype=torch.bool)}),
        (FUSION, {"head_dim": 520}, {}),
        (FUSION, {"heads": 65, "kv_heads": 1}, {}),
    ],
)
def test_the_operator_of_a_batched_call(simulate, calls, operator, shape, options):
    simulate()
    run(dense(**{"batch": 2, "seqlen_q": 5, **HALF, **shape}), **options)
    assert [call.name for call in calls] == [operator]


@pytest.mark.parametrize(
    ("operator", "lengths", "dim", "options"),
    [
        (SECOND, ([3, 5], None), 64, {"causal": True}),
        (SECOND, ([3, 5], [7, 5]), 128, {"window_size": (2, 1)}),
        (FUSION, ([3, 5], None), 64, {}),
        (FUSION, ([3, 5], None), 80, {"causal": True}),
        (FUSION, ([7, 5], [3, 5]), 64, {"causal": True}),
        (FUSION, ([1, 1], [3, 5]), 64, {"window_size": (1, 0)}),
    ],
)
def test_the_operator_of_a_packed_call(simulate, calls, operator, lengths, dim, options):
    simulate()
    *rows, sequences = packed(*lengths, head_dim=dim, **HALF)
    run(rows, sequences=sequences, **options)
    assert [call.name for call in calls] == [operator]


def test_gradients_take_the_training_operator(simulate, calls):
    simulate()
    run(dense(**HALF), True).sum().backward()
    assert [call.name for call in calls] == [FUSION]


@pytest.mark.parametrize("is_packed", [False, True])
def test_gradients_of_sinks_alone_take_the_training_operator(simulate, calls, is_packed):
    simulate()
    *rows, sequences = packed([3, 5], head_dim=64, **HALF)
    inputs, options = (rows, {"sequences": sequences}) if is_packed else (dense(**HALF), {})
    sinks = randn(4, seed=3).requires_grad_()
    run(inputs, sinks=sinks, causal=True, **options).sum().backward()
    assert [call.name for call in calls] == [FUSION]
    assert sinks.grad is not None


def test_an_old_release_has_the_first_version(simulate, calls, release):
    simulate(torch_npu=release)
    *rows, sequences = packed([3, 5], head_dim=64, **HALF)
    run(dense(**HALF), causal=True)
    run(rows, sequences=sequences, causal=True)
    # The first version has no packed head dim of 64.
    assert [call.name for call in calls] == ([FIRST, FUSION] if release == "7.0" else [SECOND, SECOND])


def test_one_query_reads_the_keys_of_its_window_only(simulate, calls):
    """These operators ignore a band beside one query."""
    for generation in ("Ascend910B1", "Ascend310P3"):
        simulate(generation)
        run(dense(2, 1, 100, **HALF), window_size=(9, 0))
    assert [(call.name, call["key"].shape[1], call["atten_mask"]) for call in calls] == [
        (SECOND, 10, None),
        (INCREMENT, 10, None),
    ]


def test_offsets_are_host_integers_without_the_leading_zero_and_one_call(simulate, calls):
    simulate()
    for dim in (16, 64):
        *rows, sequences = packed([3, 5, 2], [4, 6, 2], head_dim=dim, **HALF)
        run(rows, sequences=sequences, causal=True)
    for call in calls:
        assert call["input_layout"] == "TND"
        assert list(call["actual_seq_qlen"]) == [3, 8, 10]
        assert list(call["actual_seq_kvlen"]) == [4, 10, 12]
    assert [call.name for call in calls] == [FUSION, SECOND]


def test_layers_share_the_metadata_of_a_batch(simulate, monkeypatch):
    simulate()
    built = []
    original = AscendMetadataBuilder.build

    def build(self, sequences, request):
        built.append(sequences)
        return original(self, sequences, request)

    monkeypatch.setattr(AscendMetadataBuilder, "build", build)
    *rows, sequences = packed([3, 5, 2], **HALF)
    for _ in range(3):
        run(rows, sequences=sequences, causal=True)
    assert built == [sequences]


def test_no_row_of_a_mask_is_hidden_altogether(simulate, calls):
    simulate()
    mask = randn(2, 1, 6, 4, seed=1) > 0
    mask[0, 0, 2] = False
    run(dense(2, 6, 4, **HALF), mask=mask, causal=True)
    (call,) = calls
    assert call["sparse_mode"] == 1
    assert tuple(call["atten_mask"].shape) == (2, 1, 6, 4)
    assert not call["atten_mask"].all(-1).any()


@pytest.mark.parametrize("shape", [(1, 1, 1, 4), (2, 1, 1, 4), (1, 3, 1, 1), (2, 3, 6, 4)])
def test_masks_get_shapes_that_the_operator_takes(simulate, calls, shape):
    simulate()
    run(dense(2, 6, 4, heads=3, **HALF), mask=randn(*shape, seed=2, **HALF))
    (call,) = calls
    assert tuple(call["atten_mask"].shape) in ((1, 1, 6, 4), (2, 1, 6, 4), (2, 3, 6, 4))
    assert tuple(call["pse"].shape) in ((2, 3, 1, 4), (1, 3, 6, 4), (2, 3, 6, 4))


def test_rows_that_are_too_long_go_heads_first(simulate, calls):
    simulate()
    inputs = dense(1, 2, 3, heads=256, kv_heads=4, head_dim=256, **HALF)
    output, lse = run(inputs, return_lse=True)
    assert calls[0]["input_layout"] == "BNSD"
    right, right_lse = run(inputs, return_lse=True, backend="ascend_math")
    torch.testing.assert_close(output, right, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse, right_lse, rtol=1e-5, atol=1e-5)


def test_sinks_go_where_the_release_has_them(simulate, calls, release):
    simulate(torch_npu=release)
    sinks = randn(4, seed=3)
    run(dense(dtype=torch.float32), sinks=sinks)
    run(dense(dtype=torch.float32), sinks=sinks, return_lse=True)
    assert ["sink" in call.given for call in calls] == [release in ("7.3", "26.0"), False]
    calls.clear()
    *rows, sequences = packed([3, 5], head_dim=64, **HALF)
    run(rows, sequences=sequences, causal=True, sinks=sinks)
    run(rows, sequences=sequences, causal=True, sinks=sinks.bfloat16())
    expected = [False, True] if release != "7.0" else [False, False]
    assert ["learnable_sink" in call.given for call in calls] == expected


def test_packed_softmax_layout_is_asked_for_where_the_release_has_it(simulate, calls, release):
    simulate(torch_npu=release)
    *rows, sequences = packed([3, 5], dtype=torch.float32)
    run(rows, sequences=sequences, return_lse=True)
    assert ("softmax_layout" in calls[0].given) == (release != "7.0")


@pytest.mark.parametrize(
    ("name", "generation"),
    [
        ("Ascend910B1", Generation.A2),
        ("Ascend910B4-1", Generation.A2),
        ("Ascend910_9391", Generation.A3),
        ("Ascend950DT_9571", Generation.ASCEND_950),
        ("Ascend310P3", Generation.INFERENCE_310P),
        ("Ascend910B", Generation.OTHER),
        ("Ascend910A", Generation.OTHER),
        ("Ascend910ProB", Generation.OTHER),
        ("Ascend310B1", Generation.OTHER),
    ],
)
def test_generations_by_name(name, generation):
    """The chip that is called Ascend910B and nothing more is not an Atlas A2."""
    assert generation_of(name) is generation
