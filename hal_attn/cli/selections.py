"""How the verbs show a selection, and where they find the device of a call."""

from __future__ import annotations

from dataclasses import asdict

import torch
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hal_attn import inventory
from hal_attn.cli import output
from hal_attn.errors import InvalidAttentionInputError, UnsupportedAttentionError
from hal_attn.registry import Registry
from hal_attn.selection import Candidate, Selection
from hal_attn.settings import read


def selection_facts(selection: Selection, subject: str = "Request") -> Table:
    """The request under the name `subject`, the platform, the backend chosen, and who decided."""
    platform, chosen = selection.platform, selection.chosen
    facts: dict[str, RenderableType] = {
        subject: selection.request.describe(),
        "Platform": f"{platform.name} (SIMULATED)" if platform.simulated else platform.name,
        "Chosen": Text(chosen.name if chosen else "none", style="bold green" if chosen else "bold red"),
        "Decided by": selection.source,
    }
    if selection.remarks:
        facts["Note"] = "\n".join(selection.remarks)
    return output.fields(facts)


def candidates_table(selection: Selection) -> Table:
    """Every candidate in the order of preference, what was measured of it, and each rule by which it refuses."""
    timed = bool(selection.measured)
    rows: list[tuple[RenderableType, ...]] = [
        (
            candidate.backend.name,
            output.state(selection.verdict(candidate)),
            *([_milliseconds(selection, candidate)] if timed else []),
            output.bullets([*_left_out(selection, candidate), *_refusals(candidate)]),
        )
        for candidate in selection.considered
    ]
    return output.table(("Candidate", "Verdict", *(["Measured"] if timed else []), "Why not"), rows)


def _milliseconds(selection: Selection, candidate: Candidate) -> str:
    time = dict(selection.measured).get(candidate.backend.name)
    return "" if time is None else f"{time:.4g} ms"


def _left_out(selection: Selection, candidate: Candidate) -> list[RenderableType]:
    reasons = dict(selection.measurement.left_out) if selection.measurement else {}
    reason = reasons.get(candidate.backend.name)
    return [] if reason is None else [Text(f"left out of the measurement: {reason}")]


def _refusals(candidate: Candidate) -> list[RenderableType]:
    return [output.refusal(reason, reason.hint) for reason in candidate.refusals]


def selection_json(selection: Selection) -> dict[str, object]:
    """A selection as JSON: platform, chosen, source, order_source, notes, measurement, considered."""
    record = selection.measurement
    return {
        "platform": {"name": selection.platform.name, "simulated": selection.platform.simulated},
        "chosen": selection.chosen.name if selection.chosen else None,
        "source": selection.source,
        "order_source": selection.order_source or None,
        "notes": list(selection.notes),
        "measurement": None if record is None else {**record.json(), "origin": record.origin},
        "considered": [
            {
                "backend": candidate.backend.name,
                "verdict": selection.verdict(candidate),
                "refusals": [asdict(reason) for reason in candidate.refusals],
            }
            for candidate in selection.considered
        ],
    }


def find_device(name: str | None, registry: Registry) -> torch.device:
    """The device asked for, where a platform here runs it; without a name the first accelerator that a backend here can
    run on, else the CPU.

    Raises:
        InvalidAttentionInputError: no name of a device, or of one that is not here.
        UnsupportedAttentionError: no platform here runs tensors on it.
    """
    settings = read()
    if name is None:
        able = {status.platform for status in inventory.backends(registry=registry) if status.usable}
        able = able if settings.platform is None else able & {settings.platform}
        here = [status for status in inventory.platforms(registry) if status.name in able and status.available]
        names = [device.device for status in here for device in status.devices]
        # A simulated platform may call its devices by the vendor's name; its tensors are the CPU's.
        name = "cpu" if settings.simulate else next((found for found in names if found != "cpu"), "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        # PyTorch knows some device types ("npu") only once a vendor's package is loaded; its platform says what lacks.
        for platform in registry.platforms:
            found = registry.detection(platform)
            if platform.device_type == name.partition(":")[0] and not found.available:
                reason = f"{platform.name} owns it, but: {found.reason}. {found.remedy}".rstrip()
                raise UnsupportedAttentionError(f"no platform runs tensors on device {name}: {reason}") from None
        raise InvalidAttentionInputError("--device", repr(name), "a device of PyTorch, as in cpu or cuda:0") from None
    registry.platform_for(device, settings)
    try:
        torch.empty((), device=device)
    except (RuntimeError, AssertionError) as error:  # PyTorch's ways to say that a device is not there
        reason = str(error).partition("\n")[0]
        raise InvalidAttentionInputError("--device", f"{device} ({reason})", "a device that is here") from None
    return device
