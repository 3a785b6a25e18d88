"""What is measured: the ways of sharing a problem among ranks, all behind one face; here our own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hal_attn.bench.problem import Problem
from hal_attn.errors import HalAttnError, InvalidAttentionInputError
from hal_attn.sequence_parallel import SequenceParallelGroups
from hal_attn.sequence_parallel.description import Layout
from hal_attn.sequence_parallel.traffic import Traffic, traffic

Tensors = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Running:
    """A problem opened on this rank.

    Attributes:
        attend: output of this rank's query, key, value.
        shard, shard_kv: this rank's rows of a whole tensor; what `attend` takes, and how its output is laid out.
        backend: the name of the backend that ran, once it has run; empty where it is not ours.
        traffic: what this rank sends, forward, and forward with backward; None where nobody counted.
    """

    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    shard: Callable[[Tensor], Tensor]
    shard_kv: Callable[[Tensor], Tensor]
    backend: Callable[[], str] = str
    traffic: tuple[Traffic, Traffic] | None = None


class Contender(Protocol):
    """One way of sharing.

    Attributes:
        name: at most 22 characters, for a table.
        peer: somebody else's.
        failures: exceptions that mean a refusal.
    """

    @property
    def name(self) -> str: ...
    @property
    def peer(self) -> bool: ...
    @property
    def failures(self) -> tuple[type[Exception], ...]: ...

    def refusal(self, problem: Problem, backward: bool) -> str | None:
        """Why this problem is not for it; None where it may be tried."""

    def opened(self, problem: Problem, tensors: Tensors, backends: Sequence[str]) -> AbstractContextManager[Running]:
        """The problem on this rank, on the first of `backends` that takes it; everything is as it was afterwards."""


@dataclass(frozen=True)
class Mode:
    """A mode of `hal_attn.sequence_parallel`; `groups` None where the ranks do not allow it, and why. With `cut` no
    packed sequence is left whole on a rank, so that every one travels."""

    name: str
    groups: SequenceParallelGroups | None
    why: str = ""
    cut: bool = False
    peer: bool = False
    failures: tuple[type[Exception], ...] = (HalAttnError,)

    def refusal(self, problem: Problem, backward: bool) -> str | None:
        """Why the ranks do not allow it, or the mode without `cut` does the same."""
        if self.cut and not problem.packed:
            return "a dense batch is always cut"
        return self.why if self.groups is None else None

    @contextmanager
    def opened(self, problem: Problem, tensors: Tensors, backends: Sequence[str]) -> Iterator[Running]:
        """A plan for the problem."""
        assert self.groups is not None
        layout: Layout = ("zigzag" if problem.causal else "contiguous") if self.cut else "auto"
        plan = self.groups.plan(**problem.shape, layout=layout)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            output = plan.attention(query, key, value, backend=list(backends))
            assert isinstance(output, Tensor)
            return output

        sizes = (problem.heads, problem.kv_heads, problem.head_dim, problem.head_dim, problem.itemsize)
        sent = (traffic(plan, *sizes), traffic(plan, *sizes, backward=True))

        def ran() -> str:
            return ", ".join(sorted(plan.backends))

        yield Running(attend, plan.shard, plan.shard_kv, ran, sent)


_CUT = " cut"
MODES = ("ulysses", "ring", "kv_gather", "ring cut", "kv_gather cut", "ulysses x ring", "ulysses x kv_gather")


def parse_modes(text: str) -> tuple[str, ...]:
    """Names of modes separated by commas.

    Raises:
        InvalidAttentionInputError: a name that is none.
    """
    names = tuple(" ".join(name.split()) for name in text.split(","))
    for name in names:
        if name not in MODES:
            raise InvalidAttentionInputError("--modes", repr(name), f"any of {', '.join(MODES)}")
    return names


def make_modes(names: Sequence[str], ranks: int) -> list[Mode]:
    """The modes by these names over all ranks, made on all of them alike; both ways at once with Ulysses as narrow as
    it can be; "cut" with every packed sequence cut."""
    made = []
    for name in names:
        parts = name.split(" x ")
        factors = [n for n in range(2, ranks) if ranks % n == 0]
        if ranks == 1:
            made.append(Mode(name, None, "one rank shares with nobody: start with torchrun --nproc-per-node"))
        elif len(parts) == 1:
            made.append(Mode(name, _groups({name.removesuffix(_CUT): ranks}), cut=name.endswith(_CUT)))
        elif not factors:
            made.append(Mode(name, None, f"{ranks} ranks have no two factors above 1; 4 ranks do"))
        else:
            degrees = {parts[0]: factors[0], parts[1]: ranks // factors[0]}
            label = name.replace("ulysses x kv_gather", "ulysses x gather")
            made.append(Mode(f"{label} {factors[0]}x{ranks // factors[0]}", _groups(degrees)))
    return made


def _groups(degrees: Mapping[str, int]) -> SequenceParallelGroups:
    given = (degrees.get(name) for name in ("ulysses", "ring", "kv_gather"))
    return SequenceParallelGroups.create(*given, peer_copies=True)
