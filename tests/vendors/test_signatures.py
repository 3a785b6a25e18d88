"""The signature data: whole, bindable, and strict about what a release does not have yet."""

import inspect

import pytest
import torch

from tests.vendors import signatures

OPERATORS = [id for id, function in signatures.functions().items() if function.schema is not None]


@pytest.mark.parametrize("id", OPERATORS)
def test_parameters_are_those_of_the_schema(id):
    schema = torch._C.parse_schema(signatures.schema(id))
    expected = [
        (
            argument.name,
            "KEYWORD_ONLY" if argument.kwarg_only else "POSITIONAL_OR_KEYWORD",
            argument.default_value if argument.has_default_value() else inspect.Parameter.empty,
        )
        for argument in schema.arguments
    ]
    assert signatures.plain(signatures.signature(id)) == expected
    assert len(signatures.functions()[id].returns) == len(schema.returns)


@pytest.mark.parametrize("function", signatures.functions().values(), ids=lambda function: function.id)
def test_id_is_module_and_name(function):
    assert function.id == f"{function.module}.{function.name}"
    assert (function.source is None) != (function.schema is None)
    assert function.returns


def test_bind_refuses_a_parameter_that_does_not_exist():
    with pytest.raises(TypeError, match="pre_tokens"):
        signatures.bind("torch_npu.npu_fusion_attention", ("q", "k", "v", 4, "BSND"), {"pre_tokens": 1})


@pytest.mark.parametrize(
    ("id", "arguments", "too_early", "first"),
    [
        (
            "torch_npu.npu_fusion_attention",
            {"head_num": 4, "input_layout": "TND", "softmax_layout": "TND"},
            "7.0",
            "7.2",
        ),
        ("torch_npu.npu_fusion_attention", {"head_num": 4, "input_layout": "TND", "sink": "s"}, "7.2", "7.3"),
        ("torch_npu.npu_fusion_attention", {"head_num": 4, "input_layout": "TND", "seed": 3}, "7.3", "26.0"),
        ("torch_npu.npu_fused_infer_attention_score_v2", {}, "7.0", "7.2"),
        ("flash_attn.flash_attn_func", {"window_size": (3, 0)}, "2.2.5", "2.3"),
        ("flash_attn.flash_attn_func", {"softcap": 1.0}, "2.5.9.post1", "2.6.0"),
    ],
)
def test_bind_refuses_what_a_release_does_not_have_yet(id, arguments, too_early, first):
    with pytest.raises(TypeError, match="first release"):
        signatures.bind(id, ("q", "k", "v"), arguments, release=too_early)
    signatures.bind(id, ("q", "k", "v"), arguments, release=first)


def test_same_signature_sees_order_kind_and_default():
    def same(lse, local_out, update_type): ...

    def other_order(local_out, lse, update_type): ...

    def other_kind(lse, local_out, *, update_type): ...

    def other_default(lse, local_out, update_type=0): ...

    signatures.assert_same_signature(same, "torch_npu.npu_attention_update")
    for function in (other_order, other_kind, other_default):
        with pytest.raises(AssertionError, match="differs"):
            signatures.assert_same_signature(function, "torch_npu.npu_attention_update")
