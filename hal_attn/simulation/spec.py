"""What `HAL_ATTN_SIMULATE` says after the vendor's name: a device generation, and choices about the vendor's kernels.

```
ascend                                     the default generation
ascend:Ascend310P3                         another one
ascend:Ascend910B1,empty_lse=nan           rows without keys give NaN, which the vendor leaves open
ascend:empty_lse=-inf,torch_npu=7.2        the default generation, an older library
```
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hal_attn.errors import ConfigurationError

EMPTY_LSE = {"inf": math.inf, "+inf": math.inf, "-inf": -math.inf, "nan": math.nan, "0": 0.0}


@dataclass(frozen=True)
class SimulationSpec:
    """One simulated device: its `generation`, and for each choice of its vendor the value taken."""

    generation: str
    choices: Mapping[str, str]

    @property
    def empty_lse(self) -> float | None:
        """What a row without keys gives as LSE; None where the vendor says it, and nobody chose otherwise."""
        text = self.choices.get("empty_lse", "")
        return EMPTY_LSE[text] if text else None

    @classmethod
    def parse(
        cls, text: str | None, vendor: str, generations: Sequence[str], choices: Mapping[str, Sequence[str]]
    ) -> SimulationSpec:
        """The device that `text` asks for: one of `generations`, the first by default, then `name=value` by `choices`,
        whose first values are the defaults. A generation may be cut short where it stays clear ("910B", "310P").

        Raises:
            ConfigurationError: a generation, a choice or a value that is none of these.
        """
        allowed = {"empty_lse": ("", *EMPTY_LSE), **choices}
        taken = {name: values[0] for name, values in allowed.items()}
        generation = generations[0]
        given: set[str] = set()
        for index, part in enumerate((text or "").split(",")):
            name, separator, value = (piece.strip() for piece in part.partition("="))
            if not separator and index == 0:
                generation = _generation(name, vendor, generations) if name else generation
                continue
            value = value.lower() if value.lower() in allowed.get(name, ()) else value
            if value not in allowed.get(name, ()) or not value or name in given:
                raise _wrong(vendor, part, allowed, generations)
            given.add(name)
            taken[name] = value
        return cls(generation, taken)


def _generation(name: str, vendor: str, generations: Sequence[str]) -> str:
    if name in generations:
        return name
    found = [generation for generation in generations if name.lower() in generation.lower()]
    if len(found) == 1:
        return found[0]
    close = difflib.get_close_matches(name, generations, n=1, cutoff=0.4)
    hint = f" ({name} fits {', '.join(found)})" if found else f" (did you mean {close[0]}?)" if close else ""
    raise ConfigurationError(
        f"HAL_ATTN_SIMULATE: got generation {name!r} of {vendor}; allowed: {', '.join(generations)}{hint}"
    )


def _wrong(
    vendor: str, part: str, allowed: Mapping[str, Sequence[str]], generations: Sequence[str]
) -> ConfigurationError:
    values = "; ".join(f"{name}={'|'.join(filter(None, values))}" for name, values in allowed.items())
    return ConfigurationError(
        f"HAL_ATTN_SIMULATE: got {part.strip()!r} for {vendor}; allowed: {vendor}:GENERATION,NAME=VALUE with {values}, "
        f"GENERATION one of {', '.join(generations)}"
    )
