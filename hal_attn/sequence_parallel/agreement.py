"""Ranks that disagree would hang or compute nonsense: they compare what they are about to do, and all raise alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar, cast

import torch.distributed as dist

from hal_attn.errors import InvalidAttentionInputError, shortened

T = TypeVar("T")


def agreed(
    group: dist.ProcessGroup | None, make: Callable[[], T], describe: Callable[[T], Mapping[str, object]]
) -> tuple[T, list[Mapping[str, object]]]:
    """What `make` returns, once every rank of `group` made its own and described it alike; and all descriptions.

    Names that begin with "_" are told, and may differ. One exchange of host objects.

    Raises:
        Exception: what `make` raised here.
        InvalidAttentionInputError: what it raised elsewhere; or naming what differs, and each rank's value.
    """
    made: T | None = None
    failure: Exception | None = None
    try:
        made = make()
        own = dict(describe(made))
    except Exception as error:  # whatever it is, the others must not wait
        failure, own = error, {"error": f"{type(error).__name__}: {error}"}
    found: list[Mapping[str, object]] = [own]
    if group is not None and dist.get_world_size(group) > 1:
        gathered: list[Mapping[str, object] | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, own, group=group)
        found = [description or {} for description in gathered]
    if failure is not None:
        raise failure
    failed = [(rank, text["error"]) for rank, text in enumerate(found) if "error" in text]
    if failed:
        rank, text = failed[0]
        raise InvalidAttentionInputError(
            "the sequence parallel group", f"on rank {rank}: {text}", "the same on every rank"
        )
    _compare(found)
    return cast("T", made), found


def _compare(found: list[Mapping[str, object]]) -> None:
    for name in sorted({name for description in found for name in description if not name.startswith("_")}):
        values = [description.get(name) for description in found]
        if any(value != values[0] for value in values):
            ranks: dict[str, list[str]] = {}
            for rank, value in enumerate(values):
                ranks.setdefault(shortened(repr(value), 120), []).append(str(rank))
            told = "; ".join(f"rank {', '.join(which)}: {value}" for value, which in ranks.items())
            raise InvalidAttentionInputError(
                name, told, "the same on every rank of the sequence parallel group", "the ranks would wait for ever"
            )
