"""The simulation itself: torch_npu's schemas, its limits, and the pitfalls that an adapter must avoid."""

import math

import pytest
import torch
from hal_attn_ascend.simulation.schemas import RELEASES, SCHEMAS, schemas

from hal_attn import ConfigurationError, attention, explain
from tests.support import dense, packed
from tests.vendors import signatures

HALF = {"dtype": torch.float16}
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


@pytest.fixture
def operators(simulate):
    """The operators of a simulated device."""
    return lambda *arguments, **options: simulate(*arguments, **options).operators()


def fusion(operators, inputs, layout="BSND", **options):
    return operators.npu_fusion_attention(*inputs, inputs[0].shape[-2], layout, **options)


def infer(operators, inputs, layout="BSND", **options):
    heads = {"num_query_heads": inputs[0].shape[-2], "num_key_value_heads": inputs[1].shape[-2]}
    return operators.npu_fused_infer_attention_score_v2(*inputs, input_layout=layout, **heads, **options)


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_are_those_of_torch_npu(name):
    recorded = signatures.schema(f"torch_npu.{name}")
    assert schemas("26.0")[name] == recorded[recorded.index("npu_") :].removeprefix("npu::")


def test_the_dispatcher_refuses_what_a_release_does_not_have(operators, release):
    found = operators(torch_npu=release)
    first = {"softmax_layout": "7.2", "sink": "7.3", "seed": "26.0"}
    values = {"softmax_layout": "", "sink": torch.zeros(4), "seed": 5}
    for name, since in first.items():
        if RELEASES.index(release) >= RELEASES.index(since):
            fusion(found, dense(**HALF), **{name: values[name]})
        else:
            with pytest.raises(RuntimeError, match=name):
                fusion(found, dense(**HALF), **{name: values[name]})
    assert hasattr(found, "npu_fused_infer_attention_score_v2") == (release != "7.0")


def test_scale_is_one_and_the_mode_counts_for_nothing_without_a_mask(operators):
    found = operators()
    inputs = dense(1, 4, dtype=torch.float32)
    plain = fusion(found, inputs)[0]
    torch.testing.assert_close(plain, attention(*inputs, scale=1.0, backend="ascend_math"))
    assert torch.equal(plain, fusion(found, inputs, sparse_mode=3)[0])
    assert torch.equal(plain, fusion(found, inputs, next_tockens=0)[0])


def test_modes_hang_from_their_corners(operators):
    found = operators()
    inputs = dense(1, 3, 5, dtype=torch.float32)
    options = {"scale": 0.25, "atten_mask": TRIANGLE}
    bottom_right = fusion(found, inputs, sparse_mode=3, **options)[0]
    torch.testing.assert_close(bottom_right, attention(*inputs, causal=True, backend="ascend_math"))
    top_left = fusion(found, inputs, sparse_mode=2, **options)[0]
    first_three = (inputs[0], inputs[1][:, :3], inputs[2][:, :3])
    torch.testing.assert_close(top_left, attention(*first_three, causal=True, backend="ascend_math"))
    band = fusion(found, inputs, sparse_mode=4, pre_tockens=1, next_tockens=0, **options)[0]
    torch.testing.assert_close(band, attention(*inputs, window_size=(1, 0), backend="ascend_math"))


def test_packed_numbers_lie_heads_first_unless_told_otherwise(operators):
    found = operators()
    query, key, value, _ = packed([2, 3], heads=4, dtype=torch.float32)
    ends = {"actual_seq_qlen": [2, 5], "actual_seq_kvlen": [2, 5]}
    theirs = fusion(found, (query, key, value), "TND", **ends)[1]
    tokens_first = fusion(found, (query, key, value), "TND", softmax_layout="TND", **ends)[1]
    assert theirs.shape == tokens_first.shape == (5, 4, 8)
    assert torch.equal(theirs.flatten()[: 2 * 4 * 8], tokens_first[:2].transpose(0, 1).flatten())
    assert torch.equal(theirs.flatten()[2 * 4 * 8 :], tokens_first[2:].transpose(0, 1).flatten())


def test_one_query_ignores_the_mode(operators):
    found = operators()
    inputs = dense(1, 1, 6, **HALF)
    band = {"sparse_mode": 4, "pre_tokens": 1, "next_tokens": 0, "atten_mask": TRIANGLE}
    assert torch.equal(infer(found, inputs, **band)[0], infer(found, inputs)[0])


@pytest.mark.parametrize(("chosen", "value"), [("inf", math.inf), ("-inf", -math.inf), ("nan", math.nan), ("0", 0.0)])
def test_rows_without_keys_as_chosen(operators, chosen, value):
    found = operators(empty_lse=chosen)
    options = {"sparse_mode": 3, "atten_mask": TRIANGLE}
    _, softmax_max, softmax_sum, *_ = fusion(found, dense(1, 3, 2, **HALF), **options)
    torch.testing.assert_close((softmax_max + softmax_sum.log())[0, 0, 0, 0], torch.tensor(value), equal_nan=True)
    lse = infer(found, dense(1, 3, 2, **HALF), inner_precise=2, return_softmax_lse=True, **options)[1]
    torch.testing.assert_close(lse[0, 0, 0, 0], torch.tensor(value), equal_nan=True)


def test_rows_without_keys_are_wrong_unless_made_valid(operators):
    found = operators()
    inputs = dense(1, 3, 2, **HALF)
    options = {"sparse_mode": 4, "pre_tockens": 2**31 - 1, "next_tockens": 0, "atten_mask": TRIANGLE}
    assert fusion(found, inputs, **options)[0][0, 0].any()
    assert not fusion(found, inputs, inner_precise=2, **options)[0][0, 0].any()


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        ({}, {"sparse_mode": 3, "atten_mask": TRIANGLE[:5, :5]}, "2048 x 2048"),
        ({}, {"sparse_mode": 3, "atten_mask": ~TRIANGLE}, "no triangle"),
        ({}, {"atten_mask": torch.zeros(1, 1, 1, 5).bool()}, "atten_mask of shape"),
        ({}, {"atten_mask": torch.zeros(5, 5)}, "atten_mask of dtype"),
        ({}, {"pse": torch.zeros(1, 1, 5, 5).half()}, "pse of shape"),
        ({}, {"softmax_layout": "TND"}, "only with input_layout TND"),
        ({}, {"sink": torch.zeros(4).half()}, "sink is float32"),
        ({"head_dim": 8, "value_head_dim": 9}, {}, "head dims"),
        ({"heads": 257}, {}, "257 heads"),
    ],
)
def test_limits_of_the_training_operator(operators, shape, options, words):
    with pytest.raises(RuntimeError, match=words):
        fusion(operators(), dense(**{**HALF, **shape}), **options)


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        ({"dtype": torch.float32}, {}, "dtype"),
        ({"head_dim": 12}, {}, "head dim 12"),
        ({"value_head_dim": 32}, {}, "differ in shape"),
        ({"heads": 130, "kv_heads": 2}, {}, "130 over 2 heads"),
        ({"heads": 256, "head_dim": 256, "seqlen_q": 2}, {}, "65535"),
        ({}, {"sparse_mode": 3}, "compressed atten_mask"),
        ({"seqlen_q": 1}, {"inner_precise": 2}, "one query"),
        ({}, {"learnable_sink": torch.zeros(4).bfloat16()}, "only in TND"),
    ],
)
def test_limits_of_the_inference_operator(operators, shape, options, words):
    with pytest.raises(RuntimeError, match=words):
        infer(operators(), dense(**{**HALF, **shape}), **options)


def test_the_inference_operator_wants_contiguous_tensors_and_the_number_of_heads(operators):
    found = operators()
    query, key, value = dense(**HALF)
    with pytest.raises(RuntimeError, match="not contiguous"):
        infer(found, (query, key.transpose(1, 2).contiguous().transpose(1, 2), value))
    with pytest.raises(RuntimeError, match="told of 1 query heads"):
        found.npu_fused_infer_attention_score_v2(query, key, value, input_layout="BSND")


@pytest.mark.parametrize(
    ("dim", "ends_q", "ends_k", "options", "words"),
    [
        (16, [2, 5], [2, 5], {}, "head dims"),
        (64, [2, 2, 5], [2, 2, 5], {}, "an empty sequence"),
        (64, [0, 2, 5], [0, 2, 5], {}, "an empty sequence"),
        (64, [2, 5], [1, 5], {"sparse_mode": 3, "atten_mask": TRIANGLE}, "more queries than keys"),
        (64, [2, 4], [2, 5], {}, "ends at 4"),
        (64, [2, 5], [2, 5], {"sparse_mode": 3}, "mode and mask"),
    ],
)
def test_limits_of_the_inference_operator_packed(operators, dim, ends_q, ends_k, options, words):
    query, key, value, _ = packed([5], head_dim=dim, **HALF)
    with pytest.raises(RuntimeError, match=words):
        infer(operators(), (query, key, value), "TND", actual_seq_qlen=ends_q, actual_seq_kvlen=ends_k, **options)


def test_generations_have_their_own_operators(operators):
    inputs = dense(**HALF)
    for generation, words in (("Ascend950DT", "Ascend950DT"), ("Ascend310P3", "Ascend310P3")):
        with pytest.raises(RuntimeError, match=f"{words}: not supported"):
            infer(operators(generation), inputs)
    with pytest.raises(RuntimeError, match="not supported"):
        fusion(operators("Ascend310P3"), inputs)
    with pytest.raises(RuntimeError, match="not supported"):
        operators("Ascend950DT").npu_prompt_flash_attention(*inputs, num_heads=4, input_layout="BSND")


def test_a_mask_beside_the_default_next_tokens_is_cut_at_the_diagonal(operators):
    found = operators("Ascend310P3")
    inputs = dense(1, 3, **HALF)
    open_mask = torch.zeros(3, 3, dtype=torch.bool)
    options = {"num_heads": 4, "input_layout": "BSND", "scale_value": 0.25, "atten_mask": open_mask}
    cut = found.npu_prompt_flash_attention(*inputs, **options)
    torch.testing.assert_close(cut, attention(*inputs, causal=True, backend="ascend_math"), rtol=2e-3, atol=2e-3)


def test_two_devices_at_once_keep_their_own_rules(operators):
    first, second = operators("Ascend910B1", empty_lse="nan"), operators("Ascend910B1", empty_lse="0")
    options = {"sparse_mode": 3, "atten_mask": TRIANGLE}
    inputs = dense(1, 3, 2, **HALF)
    assert fusion(first, inputs, **options)[1].isnan().any()
    assert not fusion(second, inputs, **options)[1].isnan().any()
    assert fusion(first, inputs, **options)[1].isnan().any()


def test_it_says_that_it_is_simulated(simulate):
    platform = simulate("Ascend910_9391")
    assert "SIMULATED Ascend910_9391" in platform.detect().reason
    assert platform.simulated
    assert "ascend (SIMULATED)" in str(explain(*dense(**HALF)))


@pytest.mark.parametrize(
    ("text", "words"),
    [("ascend:Ascend910C", "Ascend910B1"), ("ascend:torch_npu=6.0", "26.0"), ("ascend:library=other", "simulated")],
)
def test_a_device_that_is_not_known(monkeypatch, text, words):
    monkeypatch.setenv("HAL_ATTN_SIMULATE", text)
    with pytest.raises(ConfigurationError, match=words):
        attention(*dense(**HALF))
