"""A plugin that was taken in and then raises, or answers with what is no answer: by name, and nothing else breaks."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from hal_attn_cpu.platform import CpuPlatform

from hal_attn import UnsupportedAttentionError, attention, backends, explain, platforms, settings
from hal_attn.platform import Detection, DeviceInfo
from hal_attn.registry import Registry
from tests.cli.conftest import run, words  # noqa: F401
from tests.fakes import BatchedFake, FakePlatform, fresh, install  # noqa: F401
from tests.plugins.vendors import GONE, SHOWN, backend, beside_the_cpu, giving, variant
from tests.support import dense


class OfTheCpu(FakePlatform):
    """A plugin whose tensors are the CPU's, so that a call can run; `two` before `one` by its own order."""

    def __init__(self):
        super().__init__("vendor", BatchedFake("one"), BatchedFake("two"))

    def default_order(self, request):
        return ("two", "one")


def of_the_cpu(**changes):
    return type("Variant", (OfTheCpu,), changes)


NOT_USABLE = {
    "detect() raises": (variant(detect=giving(GONE)), f"detection failed: {SHOWN}"),
    "detect() ends the process": (variant(detect=giving(SystemExit(1))), "detection failed: SystemExit: 1"),
    "detect() returns None": (variant(detect=giving(None)), "detect() returned a NoneType"),
    "a reason that is no text": (variant(detect=lambda self: Detection(True, None)), "reason: got None"),
    "versions that are no pairs": (
        variant(detect=lambda self: Detection(True, "here", versions=("1.0",))),
        "versions: got ('1.0',)",
    ),
    "devices() raises": (variant(devices=giving(GONE)), f"its devices cannot be listed: {SHOWN}"),
    "devices() returns None": (variant(devices=giving(None)), "devices() gave a NoneType"),
    "devices() returns names": (
        variant(devices=giving(("meta:0",))),
        "devices() gave a str, not a hal_attn.DeviceInfo",
    ),
    "a device without a name": (variant(devices=lambda self: (DeviceInfo("meta", None),)), "name: got None"),
}


@pytest.mark.parametrize("case", NOT_USABLE)
def test_a_platform_that_cannot_say_what_is_here_is_not_usable(case, monkeypatch, run):  # noqa: F811
    vendor, reason = NOT_USABLE[case]
    beside_the_cpu(monkeypatch, vendor)
    status = platforms()[0]
    assert (status.name, status.available) == ("vendor", False)
    assert reason in status.reason
    assert attention(*dense()).shape == dense()[0].shape
    doctor = run("doctor")
    assert doctor.exit_code == 0
    assert reason in words(doctor.stdout)
    assert "cpu_flash cpu usable" in words(doctor.stdout)


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        (GONE, SHOWN),
        (None, "TypeError"),
        ("one", "a str"),
        (([],), "a list"),
    ],
    ids=["raises", "None", "one name", "no names"],
)
def test_an_order_that_cannot_be_had_is_a_note(order, reason, monkeypatch):
    beside_the_cpu(monkeypatch, of_the_cpu(default_order=giving(order)))
    selection = explain(*dense())
    assert selection.chosen.name == "one"
    (note,) = selection.notes
    assert note.startswith("default_order() of vendor failed: ")
    assert reason in note
    assert note in str(selection)
    monkeypatch.setenv("HAL_ATTN_FALLBACK", "warn")
    assert attention(*dense()).shape == dense()[0].shape  # A warning would be an error here.


def test_a_backend_that_is_ordered_twice_is_asked_once(monkeypatch):
    beside_the_cpu(monkeypatch, of_the_cpu(default_order=giving(("two", "two", "one"))))
    assert [candidate.backend.name for candidate in explain(*dense()).considered] == ["two", "one"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(GONE, SHOWN), (None, "a NoneType"), (("too old",), "a str, not a hal_attn.Refusal")],
    ids=["raises", "None", "text"],
)
@pytest.mark.parametrize("place", ["validate", "refusals"])
def test_rules_that_fail_are_a_refusal_by_name(place, answer, reason, monkeypatch):
    if place == "validate":
        vendor = of_the_cpu(validate=giving(answer))
    else:
        one = type("Broken", (BatchedFake,), {"refusals": giving(answer)})("one")
        vendor = of_the_cpu(backends=giving((one,)))
    beside_the_cpu(monkeypatch, vendor)
    with pytest.raises(UnsupportedAttentionError) as caught:
        attention(*dense())
    who = "validate() of vendor" if place == "validate" else "refusals() of one"
    assert f"broken: have {who} failed: " in str(caught.value)
    assert reason in str(caught.value)
    monkeypatch.setenv("HAL_ATTN_PLATFORM", "cpu")
    assert attention(*dense()).shape == dense()[0].shape


def test_a_library_that_answers_with_no_refusal(monkeypatch, run):  # noqa: F811
    beside_the_cpu(monkeypatch, variant(backends=giving((backend(unavailable=giving("not there")),))))
    status = backends("meta")[0]
    assert not status.usable
    assert "unavailable() returned a str" in str(status.reason)
    assert run("doctor").exit_code == 0


def test_owning_every_device_takes_none_from_a_platform_before_it(monkeypatch):
    greedy = variant(owns=giving(True))
    install(monkeypatch, registry=Registry({"cpu": lambda: CpuPlatform, "vendor": lambda: greedy}))
    assert explain(*dense()).platform.name == "cpu"
    assert explain(*(tensor.to("meta") for tensor in dense())).platform.name == "vendor"


SIMULATIONS = {
    "raises": (GONE, SHOWN),
    "no platform": ({}, "a dict, not a hal_attn.Platform"),
    "not marked": (FakePlatform("vendor"), "simulated = True"),
    "another name": (FakePlatform("other"), "called other"),
}


@pytest.mark.parametrize("case", SIMULATIONS)
def test_a_simulation_that_is_none(case, monkeypatch, run):  # noqa: F811
    given, reason = SIMULATIONS[case]
    beside_the_cpu(monkeypatch, variant(simulation=giving(given)))
    monkeypatch.setenv("HAL_ATTN_SIMULATE", "vendor")
    with pytest.raises(UnsupportedAttentionError, match="the simulation does not start") as caught:
        attention(*dense())
    assert reason in str(caught.value)
    assert reason in words(run("doctor").stdout)


def test_a_plugin_that_does_not_answer_is_named_while_it_is_waited_for(monkeypatch):
    monkeypatch.setattr("hal_attn.guard.PATIENCE", 0.01)
    told, lines = threading.Event(), []

    class Listener(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())
            told.set()

    def hanging(answer):
        def wait(*given):
            assert told.wait(60)  # It goes on only once somebody was told.
            told.clear()
            return answer

        return wait

    listener = Listener()
    logging.getLogger("hal_attn").addHandler(listener)
    try:
        slow = variant(backends=hanging((backend(unavailable=hanging(None)),)), detect=hanging(Detection(True, "late")))
        beside_the_cpu(monkeypatch, slow)
        assert backends("meta")[0].usable
    finally:
        logging.getLogger("hal_attn").removeHandler(listener)
    asked = ("the plugin vendor", "detect() of vendor", "unavailable() of vendor_one")
    for line, what in zip(lines, asked, strict=True):
        assert line == f"{what} has not answered for 0.01 s; it is still waited for"


def test_who_answers_at_once_is_not_complained_about(caplog):
    registry = Registry({"cpu": lambda: CpuPlatform})
    assert registry.platform_for(torch.device("cpu"), settings.read()).name == "cpu"
    assert caplog.records == []
