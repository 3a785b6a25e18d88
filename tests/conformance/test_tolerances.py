"""What the error is held against: plain PyTorch on the device of the call, times what is declared."""

from dataclasses import replace
from types import MappingProxyType

import pytest
import torch
from hal_attn_cpu.platform import CpuPlatform

from hal_attn import InvalidAttentionInputError
from hal_attn.cli.verify import _show
from hal_attn.testing import Report, check_backend, html, values, verdict
from hal_attn.testing.merge import Merged
from hal_attn.testing.plain import full_precision
from hal_attn.testing.precision import compare
from hal_attn.testing.problem import Base, batched
from hal_attn.testing.road import Road
from hal_attn.testing.values import Subject
from tests.conformance import liars
from tests.conformance.working import Working
from tests.testing.reports import here

CPU = torch.device("cpu")


class TwiceRounded(Working):
    """Outputs that are 64 units in the last place off."""

    def attend(self, query, key, value, **options):
        output, lse = super().attend(query, key, value, **options)
        return output * (1 + 64 * torch.finfo(output.dtype).eps), lse


class Declares(TwiceRounded):
    tolerances = MappingProxyType({torch.float32: 50.0})


def plain(backend, **given):
    report = check_backend(backend, CpuPlatform(), "cpu", features=["batched"], **given)
    return report, next(check for check in report.checks if check.name == "plain [float32]")


def test_a_declared_error_is_allowed_and_shown(capsys):
    _, strict = plain(TwiceRounded())
    assert strict.status == "failed"
    report, check = plain(Declares())
    assert check.status == "passed"
    assert check.allowed == pytest.approx(50 * strict.allowed)
    assert report.tolerances == (("float32", 50.0),)
    whole = Report(machine=(), effort="quick", platforms=(here(),), backends=(report,), seconds=1.0)
    assert Report.from_json(whole.to_json()) == whole
    text = "cpu/working declares the error in float32: 50 times that of the precision rule was allowed."
    merged = Merged.of(whole)
    assert verdict.declared(merged) == (text,)
    assert text in html.render(merged)
    _show(merged, ())
    assert text in " ".join(capsys.readouterr().out.split())


def test_a_run_may_say_otherwise_and_the_message_has_it():
    report, check = plain(Declares(), tolerances={torch.float32: 2.0})
    assert check.status == "failed"
    assert "2 times the rule's, as declared" in check.message
    assert report.tolerances == (("float32", 2.0),)


def test_an_error_in_the_place_of_a_multiple_is_refused():
    with pytest.raises(InvalidAttentionInputError, match=r"tolerances: got 0.0001 for float32; allowed: 1.0 or more"):
        plain(Working(), tolerances={torch.float32: 1e-4})


def test_nothing_is_said_where_nothing_is_declared():
    report, _ = plain(Working())
    whole = Report(machine=(), effort="quick", platforms=(here(),), backends=(report,), seconds=1.0)
    assert verdict.declared(Merged.of(whole)) == ()


def test_a_promise_that_is_taken_back_is_not_checked():
    backend = liars.NanReachesNeighbours()
    backend.capabilities = replace(backend.capabilities, sequences_isolated=False)
    report = check_backend(backend, CpuPlatform(), "cpu", features=["neighbours"])
    check = next(check for check in report.checks if check.name == "packed, NaN in a neighbour [float32]")
    assert check.status == "not run"
    assert "sequences_isolated is not claimed" in check.message
    assert report.ok


def test_plain_pytorch_computes_where_the_call_runs(monkeypatch):
    asked = []
    monkeypatch.setattr(values, "expected", lambda *tensors, device, **options: asked.append(device))
    road = Road(Working(), CpuPlatform(), CPU)
    road.device = torch.device("cuda:1")
    Subject(road).right_answer(batched(Base(torch.float32, 8)))
    assert asked == [torch.device("cuda:1")]


@pytest.mark.parametrize("before", ["highest", "high", "medium"])
def test_full_precision_is_put_back(before):
    torch.set_float32_matmul_precision(before)
    try:
        with torch.autocast("cpu", torch.bfloat16), full_precision(CPU):
            assert torch.get_float32_matmul_precision() == "highest"
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
        assert torch.get_float32_matmul_precision() == before
    finally:
        torch.set_float32_matmul_precision("highest")


def test_full_precision_under_switches_that_pytorch_will_not_name():
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with full_precision(CPU):
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("broken", [torch.inf, -torch.inf, torch.nan], ids=str)
def test_a_device_whose_plain_pytorch_is_not_finite_allows_nothing(broken):
    right = torch.tensor([1.0, 2.0], dtype=torch.float64)
    found = compare(torch.tensor([1.0, 500.0]), right, torch.tensor([1.0, broken]))
    assert not found.ok
    assert str(found).startswith("plain PyTorch, whose error is the measure, is not finite in this call: ")
