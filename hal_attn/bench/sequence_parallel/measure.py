"""Every way of sharing a problem against one rank that has all of it: first whether it is right, then what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from hal_attn.bench import timing
from hal_attn.bench.problem import Problem
from hal_attn.bench.sequence_parallel import effort as efforts
from hal_attn.bench.sequence_parallel.contenders import Contender, Running, Tensors
from hal_attn.bench.sequence_parallel.effort import Effort
from hal_attn.bench.sequence_parallel.ranks import Ranks
from hal_attn.bench.sequence_parallel.row import BOTH, FORWARD, LOCAL, OPERATIONS, Row
from hal_attn.errors import UnsupportedAttentionError, shortened
from hal_attn.functional import attention, explain, varlen_attention
from hal_attn.selection import Selection

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

FASTEST = "fastest"
_TRIAL, _NEAR = 4096, 1.5
# Of the largest value: a few roundings of the dtype, far from what one pair too many or too few would do.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2**-7, torch.bfloat16: 2**-5}


@dataclass(frozen=True)
class Bench:
    """One problem on these ranks. `wanted`: the backend for all of it, `FASTEST`, or None for what is chosen."""

    ranks: Ranks
    problem: Problem
    effort: Effort
    wanted: str | None

    def rows(self, contenders: Sequence[Contender], passes: str) -> Iterator[Row]:
        """One rank alone first, then each of `contenders`.

        Raises:
            UnsupportedAttentionError: no backend here takes the whole problem.
        """
        backends = self.backends(passes)
        call = self._whole(backends[0])
        truth = _results(call, self.tensors, passes)
        local = self._local(Row(self.problem, LOCAL, False, backends[0], passes), call, truth)
        yield local
        whole = self._call(call, passes)
        for contender in contenders:
            row = Row(self.problem, contender.name, contender.peer, "", passes)
            yield self._tried(row, contender, backends, truth, whole)

    @cached_property
    def tensors(self) -> Tensors:
        """Whole, on every rank."""
        return self.problem.tensors(self.ranks.device)

    @cached_property
    def _exact(self) -> Tensor:
        return self.problem.exact(*self.tensors[:3])

    # One rank alone

    def backends(self, passes: str) -> tuple[str, ...]:
        """The name of the backend for the whole problem and for every mode, and after it those for a mode some of whose
        calls it refuses.

        Raises:
            UnsupportedAttentionError: none here takes it.
        """
        found = self._explained(None if self.wanted == FASTEST else self.wanted, passes)
        if found.chosen is None and passes == BOTH:
            found = self._explained(None, passes)
        if found.chosen is None:
            raise UnsupportedAttentionError(f"no backend takes {self.problem.describe()}\n{found}")
        anyone = self._explained(None, passes)
        able = [candidate.backend.name for candidate in anyone.considered if not candidate.refusals]
        first = self._fastest(able, passes) if self.wanted == FASTEST else found.chosen.name
        return (first, *(name for name in able if name != first))

    def _fastest(self, names: list[str], passes: str) -> str:
        """The fastest of these: a smaller problem leaves out those that would take for ever with this one."""
        for bench in (replace(self, problem=self.problem.smaller(_TRIAL)), self):
            if len(names) > 1:
                calls = {name: bench._call(bench._whole(name), passes) for name in names}
                times = {name: efforts.alone(self.ranks, call, Effort(3, 1, 1)) for name, call in calls.items()}
                best = min(times.values())
                names = sorted((name for name in names if times[name] <= _NEAR * best), key=lambda name: times[name])
        return names[0]

    def _call(self, attend: Attend, passes: str) -> timing.Call:
        return lambda: _results(attend, self.tensors, passes)

    def _explained(self, backend: str | None, passes: str) -> Selection:
        tensors = [tensor.detach().requires_grad_(passes == BOTH) for tensor in self.tensors[:3]]
        # Forward, the modes need its LSE; with gradients the modes have their own backward pass.
        options: dict[str, object] = {"causal": self.problem.causal, "return_lse": passes == FORWARD}
        if self.problem.packed:
            options["sequences"] = self.problem.sequences(self.ranks.device)
        return explain(tensors[0], tensors[1], tensors[2], backend=backend, **options)

    def _whole(self, backend: str) -> Attend:
        causal = self.problem.causal
        if not self.problem.packed:
            return lambda q, k, v: _one(attention(q, k, v, causal=causal, backend=backend))
        sequences = self.problem.sequences(self.ranks.device)
        return lambda q, k, v: _one(varlen_attention(q, k, v, sequences=sequences, causal=causal, backend=backend))

    def _local(self, row: Row, attend: Attend, truth: Sequence[Tensor]) -> Row:
        call = self._call(attend, row.passes)
        ms, peak = efforts.together(self.ranks, call, self.effort), self._peak(call)
        sampled = truth[0].reshape(-1, *truth[0].shape[-2:])[self.problem.sampled().to(self.ranks.device)]
        exact = self.ranks.largest([_difference(sampled, self._exact)])[0]
        return replace(row, ms=ms, teraflops=self._rate(row, ms, 1), peak=peak, exact_error=exact)

    # All ranks together

    def _tried(
        self, row: Row, contender: Contender, backends: Sequence[str], truth: Sequence[Tensor], whole: timing.Call
    ) -> Row:
        """Its row: refused where it refuses on any rank."""
        why = contender.refusal(self.problem, row.passes == BOTH)
        if why is not None:
            return replace(row, refused=why)
        with ExitStack() as stack:
            failure = None
            try:
                running = stack.enter_context(contender.opened(self.problem, self.tensors, backends))
                query, key, value, gradient = self.tensors
                local = (running.shard(query), running.shard_kv(key), running.shard_kv(value), running.shard(gradient))
                found = _results(running.attend, local, row.passes)
                if found[0].shape != local[0].shape:
                    failure = f"its output has shape {tuple(found[0].shape)}, not {tuple(local[0].shape)}"
            except contender.failures as error:
                failure = shortened(f"{type(error).__name__}: {error}".strip().partition("\n")[0], 300)
            failure = self.ranks.first_failure(failure)
            if failure is not None:
                return replace(row, refused=failure)
            row = self._checked(replace(row, backend=running.backend()), running, found, truth)
            del found
            return self._costs(row, running, lambda: _results(running.attend, local, row.passes), whole)

    def _checked(self, row: Row, running: Running, found: Sequence[Tensor], truth: Sequence[Tensor]) -> Row:
        shards = (running.shard, running.shard, running.shard_kv, running.shard_kv)
        errors = [_difference(mine, shard(all_)) for mine, all_, shard in zip(found, truth, shards, strict=False)]
        relative = [error / max(float(all_.abs().max()), 1e-30) for error, all_ in zip(errors, truth, strict=True)]
        error, worst, exact = self.ranks.largest([max(errors), max(relative), self._exact_error(running, found[0])])
        return replace(row, error=error, exact_error=exact, wrong=not worst <= _TOLERANCE[self.problem.dtype])

    def _exact_error(self, running: Running, output: Tensor) -> float:
        tokens = torch.arange(self.problem.tokens, device=output.device)
        mine = running.shard(tokens if self.problem.packed else tokens[None]).flatten()
        sampled = self.problem.sampled().to(output.device)
        place, here = torch.where(sampled[:, None] == mine)
        return _difference(output.reshape(-1, *output.shape[-2:])[here], self._exact[place])

    def _costs(self, row: Row, running: Running, call: timing.Call, whole: timing.Call) -> Row:
        alone, ms = efforts.in_turns(self.ranks, whole, call, self.effort)
        sent = least = None
        if running.traffic is not None:
            counted = running.traffic[row.passes == BOTH]
            sent, least = self.ranks.mean([counted.sent, counted.least])
        return replace(
            row,
            ms=ms,
            alone=alone,
            ideal=alone / self.ranks.size / ms,
            teraflops=self._rate(row, ms, self.ranks.size),
            sent=sent,
            least=least,
            peak=self._peak(call),
            host_waits=timing.host_waits(self.ranks.device, call),
        )

    def _peak(self, call: timing.Call) -> float:
        return self.ranks.largest([timing.peak_bytes(self.ranks.device, call)])[0]

    def _rate(self, row: Row, ms: float, ranks: int) -> float:
        return self.problem.operations * OPERATIONS[row.passes] / ms / 1e9 / ranks


def _results(attend: Attend, tensors: Tensors, passes: str) -> tuple[Tensor, ...]:
    """The output, and with the backward pass the gradients of query, key and value."""
    query, key, value, gradient = tensors
    if passes == FORWARD:
        with torch.no_grad():
            return (attend(query, key, value),)
    inputs = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    output = attend(*inputs)
    return (output.detach(), *torch.autograd.grad(output, inputs, gradient))


def _difference(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).abs().max()) if one.numel() else 0.0


def _one(result: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    assert isinstance(result, Tensor)
    return result
