"""Which backend answers: overrides count at once, capabilities and broken installs are seen, reasons are given."""

from dataclasses import replace

import pytest
import torch

from hal_attn import (
    BackendNotAvailableError,
    ConfigurationError,
    Refusal,
    UnsupportedAttentionError,
    attention,
    explain,
    select_backend,
)
from tests.fakes import BatchedFake, FakePlatform, claims, install, on_the_cpu
from tests.support import dense

TENSORS = dense(1, 4)
BROKEN = [
    Refusal("installed", "a package without the kernel's symbol", "one with it"),
    Refusal("architecture", "sm75", "sm90"),
    ImportError("undefined symbol: fwd"),
    RuntimeError("unknown gfx target"),
]


def chosen(**options):
    return select_backend(*TENSORS, **options).name


def test_a_variable_set_between_calls_decides_the_next_and_unset_it_is_forgotten(monkeypatch):
    fast, safe = BatchedFake("fast"), BatchedFake("safe")
    on_the_cpu(monkeypatch, fast, safe)
    counts = []
    for name in (None, "safe", "fast", "safe", None):
        if name is None:
            monkeypatch.delenv("HAL_ATTN_BACKEND", raising=False)
        else:
            monkeypatch.setenv("HAL_ATTN_BACKEND", name)
        attention(*TENSORS)
        counts.append((len(fast.calls), len(safe.calls)))
    assert counts == [(1, 0), (1, 1), (2, 1), (2, 2), (3, 2)]


def test_a_backend_of_an_outside_platform_can_be_named(monkeypatch):
    install(monkeypatch, FakePlatform("vendor", BatchedFake("fast"), BatchedFake("from_a_plugin")))
    monkeypatch.setenv("HAL_ATTN_BACKEND", "from_a_plugin")
    assert chosen() == "from_a_plugin"


def test_a_name_that_nobody_has_is_an_error_that_lists_those_there_are(monkeypatch):
    on_the_cpu(monkeypatch, BatchedFake("fast"))
    monkeypatch.setenv("HAL_ATTN_BACKEND", "fats")
    with pytest.raises(ConfigurationError, match="did you mean fast"):
        attention(*TENSORS)


@pytest.mark.parametrize("missing", BROKEN, ids=["symbol", "architecture", "import", "probe"])
def test_a_backend_that_cannot_run_is_passed_over_with_its_reason(missing, monkeypatch):
    on_the_cpu(monkeypatch, BatchedFake("fast", missing=missing), BatchedFake("safe"))
    assert chosen() == "safe"
    reasons = " ".join(map(str, dict(explain(*TENSORS).considered)[explain(*TENSORS).considered[0].backend]))
    assert (missing.have if isinstance(missing, Refusal) else str(missing)) in reasons


@pytest.mark.parametrize("missing", BROKEN, ids=["symbol", "architecture", "import", "probe"])
@pytest.mark.parametrize("how", ["argument", "variable"])
def test_a_backend_that_cannot_run_but_is_named_is_an_error_with_its_reason(missing, how, monkeypatch):
    on_the_cpu(monkeypatch, BatchedFake("fast", missing=missing), BatchedFake("safe"))
    if how == "variable":
        monkeypatch.setenv("HAL_ATTN_BACKEND", "fast")
    with pytest.raises(BackendNotAvailableError) as caught:
        attention(*TENSORS, backend="fast" if how == "argument" else None)
    assert (missing.have if isinstance(missing, Refusal) else str(missing)) in str(caught.value)


@pytest.mark.parametrize(
    ("lacks", "options"),
    [
        ({"window": False}, {"window_size": (1, 0)}),
        ({"causal": "none"}, {"causal": True}),
        ({"masks": frozenset()}, {"mask": torch.ones(1, 1, 4, 4, dtype=torch.bool)}),
        ({"key_padding_mask": False}, {"key_padding_mask": torch.ones(1, 4, dtype=torch.bool)}),
        ({"softcap": False}, {"softcap": 1.0}),
        ({"sinks": False}, {"sinks": torch.zeros(4)}),
        ({"alibi_slopes": False}, {"alibi_slopes": torch.ones(4)}),
        ({"dropout": False}, {"dropout_p": 0.5}),
        ({"deterministic": False}, {"deterministic": True}),
        ({"lse": False}, {"return_lse": True}),
        ({"dtypes": frozenset({torch.bfloat16})}, {}),
        ({"max_head_dim": 8}, {}),
        ({"head_dim_multiple": 32}, {}),
    ],
    ids=lambda value: next(iter(value), "plain") if isinstance(value, dict) else None,
)
def test_what_a_backend_does_not_claim_goes_to_one_that_does_and_is_refused_when_named(lacks, options, monkeypatch):
    on_the_cpu(monkeypatch, BatchedFake("fast", replace(claims(), **lacks)), BatchedFake("safe"))
    assert chosen(**options) == "safe"
    with pytest.raises(UnsupportedAttentionError, match="fast"):
        attention(*TENSORS, backend="fast", **options)


def test_an_inference_only_backend_is_not_taken_for_training(monkeypatch):
    on_the_cpu(monkeypatch, BatchedFake("fast", claims(gradients=False)), BatchedFake("safe"))
    query, key, value = TENSORS
    wanted = query.clone().requires_grad_()
    assert select_backend(query, key, value).name == "fast"
    assert select_backend(wanted, key, value).name == "safe"
    with torch.no_grad():
        assert select_backend(wanted, key, value).name == "fast"
    with pytest.raises(UnsupportedAttentionError, match="gradients"):
        attention(wanted, key, value, backend="fast")


def test_two_shapes_in_turn_do_not_answer_each_other(monkeypatch):
    on_the_cpu(monkeypatch, BatchedFake("fast", claims(max_head_dim=16)), BatchedFake("safe"))
    for head_dim, name in ((16, "fast"), (32, "safe"), (16, "fast")):
        assert select_backend(*dense(1, 4, head_dim=head_dim)).name == name
        assert attention(*dense(1, 4, head_dim=head_dim)).shape[-1] == head_dim
