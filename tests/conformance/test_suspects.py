"""The cases tell mistakes from right answers, and each known mistake is called by its name."""

import pytest
import torch

from hal_attn.testing.cases import cases
from hal_attn.testing.diagnosis import of_lse, of_output
from hal_attn.testing.precision import Comparison, compare
from hal_attn.testing.problem import Base, batched, bool_mask, float_mask, padding, sinks, slopes, varlen
from hal_attn.testing.suspects import RULE_OF, lse_suspects, suspects
from hal_attn.testing.values import right_answer

CPU = torch.device("cpu")
BASE = Base(torch.float32, 20)
# Calls whose point is that an option has no effect there.
WITHOUT_EFFECT = ("window that hides nothing",)
CALLS = {
    "causal": batched(BASE, causal=True),
    "window": batched(BASE, window_size=(9, 3)),
    "bool mask": batched(BASE, mask=bool_mask()),
    "float mask": batched(BASE, mask=float_mask()),
    "padding": batched(BASE, key_padding_mask=padding()),
    "softcap": batched(BASE, softcap=0.8),
    "sinks": batched(BASE, sinks=sinks()),
    "ALiBi": batched(BASE, 65, 37, alibi_slopes=slopes()),
    "scale": batched(BASE, scale=0.3),
    "heads": batched(BASE, kv_heads=2, value_head_dim=12),
    "packed": varlen(BASE, (7, 5, 9), (6, 8, 4)),
    "packed, causal": varlen(BASE, (7, 5, 9), causal=True),
    "packed, ALiBi": varlen(BASE, (7, 5, 9), (6, 8, 4), alibi_slopes=slopes(batch=True)),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_mistake_is_called_by_its_name(name):
    problem = CALLS[name]
    right = right_answer(problem, CPU)
    told = {}
    for suspect in suspects(problem):
        output, lse = suspect.answer(problem)
        comparison = compare(output, right.output, right.plain_output)
        if comparison.ok:
            continue
        found = of_output(problem, output, right, comparison, "precision")
        told[suspect.text] = found.message
        # Two mistakes may be one and the same in a call; then the first is named.
        same = [other.text for other in suspects(problem) if torch.equal(other.answer(problem)[0], output)]
        assert any(text in found.message for text in same), (suspect.text, found.message)
        if not torch.equal(lse, right.lse):
            assert of_lse(problem, lse, right, compare(lse, right.lse, right.plain_lse), "LSE").status == "failed"
    assert told, "no mistake shows in this call"


@pytest.mark.parametrize("name", ["sinks", "scale", "causal", "packed"])
def test_each_mistake_in_the_lse_alone_is_called_by_its_name(name):
    problem = CALLS[name]
    right = right_answer(problem, CPU)
    for text, wrong in lse_suspects(right.lse, problem):
        found = of_lse(problem, wrong, right, compare(wrong, right.lse, right.plain_lse), "LSE")
        assert text in found.message
        assert found.rule == "LSE"


@pytest.mark.parametrize("case", [case for case in cases() if not case.full], ids=lambda case: case.name)
def test_no_argument_can_be_dropped_unseen(case):
    problem = case.make(Base(torch.float32, 64))
    right = right_answer(problem, CPU)
    if case.name in WITHOUT_EFFECT:
        assert case.make(Base(torch.float32, 64)).options
        return
    ignored = {f"{name} is ignored" for name in problem.options if name in RULE_OF}
    for suspect in suspects(problem):
        if suspect.text in ignored:
            output, lse = suspect.answer(problem)
            seen = not compare(output, right.output, right.plain_output).ok
            assert seen or not compare(lse, right.lse, right.plain_lse).ok, suspect.text


def test_rounding_is_called_by_no_mistake_whose_answer_is_infinite_elsewhere():
    """An inverted padding mask hides every key of a sequence that has no padding: LSE -inf, which is far from all."""
    problem = batched(BASE, scale=0.3, key_padding_mask=padding())
    right = right_answer(problem, CPU)
    inverted = next(s for s in suspects(problem) if "padding mask is inverted" in s.text)
    assert inverted.answer(problem)[1].isneginf().any()
    found = (right.lse * (1 + 1e-5)).float()
    outcome = of_lse(problem, found, right, compare(found, right.lse, right.plain_lse), "LSE")
    assert outcome.status == "failed"
    assert "the right formula with too few digits" in outcome.message
    assert outcome.rule == "precision"


@pytest.mark.parametrize("digits", [1e-5, 1e-6])
@pytest.mark.parametrize("name", CALLS)
def test_rounding_is_no_mistake_of_structure(name, digits):
    problem = CALLS[name]
    right = right_answer(problem, CPU)
    noise = 1 + digits * torch.linspace(-1, 1, right.output.numel(), dtype=torch.float64).reshape(right.output.shape)
    output = (right.output * noise).float()
    comparison = compare(output, right.output, right.plain_output)
    outcome = of_output(problem, output, right, comparison, "structure")
    assert outcome.rule == "precision", outcome.message


def test_a_mistake_that_hardly_shows_is_not_named():
    """A sink far below every score: to leave it out changes the last digits, as rounding does."""
    problem = batched(BASE, sinks=torch.full((4,), -15.0))
    right = right_answer(problem, CPU)
    output, lse = next(s for s in suspects(problem) if s.text == "sinks is ignored").answer(problem)
    apart = (output - right.output).abs().max().item(), (lse - right.lse).abs().max().item()
    assert min(apart) > 0
    for part, of, exact in ((output, of_output, right.output), (lse, of_lse, right.lse)):
        comparison = Comparison(error=(part - exact).abs().max().item(), allowed=0.6 * max(apart))
        assert "sink" not in of(problem, part, right, comparison, "LSE").message
        shows = Comparison(error=comparison.error, allowed=0.1 * min(apart))
        assert "sink" in of(problem, part, right, shows, "LSE").message


def test_names_are_unlike():
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names)
