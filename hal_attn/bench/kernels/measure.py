"""One shape on every backend that takes it: whether it is right, how fast it is, and which of them is chosen."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor

from hal_attn.backend import AttentionBackend
from hal_attn.bench import timing
from hal_attn.bench.kernels.row import BOTH, FORWARD, OPERATIONS, Row
from hal_attn.bench.problem import Problem
from hal_attn.bench.timing import Call, Rounds
from hal_attn.bench.variables import environment
from hal_attn.bench.vendor import VendorCall, output_of, vendor_call
from hal_attn.errors import shortened
from hal_attn.functional import attention, explain, varlen_attention
from hal_attn.guard import attempt
from hal_attn.packing import PackedSequences
from hal_attn.selection import Selection

# Of the largest value: a few roundings of the dtype, far from what one pair too many or too few would do.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2**-7, torch.bfloat16: 2**-5}
Tensors = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Wanted:
    """What is measured of each shape.

    Attributes:
        backends: only these; all where there are none.
        cache: the folder of tuned choices; None where the tuned choice is not asked for.
    """

    rounds: Rounds
    backends: tuple[str, ...] = ()
    memory: bool = False
    cache: str | None = None


@dataclass(frozen=True)
class _Able:
    """A backend that runs the shape: our call, the vendor's own where it makes one, and its row so far."""

    row: Row
    call: Call
    vendor: Call | None


class Bench:
    """One shape, forward or with its gradients, on `device`."""

    def __init__(self, problem: Problem, passes: str, device: torch.device, wanted: Wanted) -> None:
        self.problem, self.passes, self.device, self.wanted = problem, passes, device, wanted
        query, key, value, self.gradient = problem.tensors(device)
        self.inputs = tuple(tensor.requires_grad_(passes == BOTH) for tensor in (query, key, value))

    def rows(self, tick: Callable[[str], None]) -> list[Row]:
        """A row for each backend of the device's platform, in its default order."""
        untuned = self._selection()
        tuned = self._tuned(tick)
        rows, able = [], []
        for candidate in untuned.considered:
            name = candidate.backend.name
            if self.wanted.backends and name not in self.wanted.backends:
                continue
            tick(name)
            row = Row(self.problem, name, self.passes, chosen=candidate.backend is untuned.chosen)
            if tuned is not None:
                row = replace(row, tuned=name == tuned)
            if candidate.refusals:
                reason = "; ".join(f"{refusal.rule}: {refusal.have}" for refusal in candidate.refusals)
                rows.append(replace(row, refused=shortened(reason, 200)))
                continue
            found, failure = attempt(partial(self._able, row, candidate.backend, untuned), None)
            if found is None:
                rows.append(replace(row, failed=True, refused=shortened(f"failed: {failure}", 200)))
            else:
                rows.append(found.row)
                able.append(found)
        tick("all in turns")
        timed = {row.backend: row for row in self._timed(able)}
        return [timed.get(row.backend, row) for row in rows]

    # What is chosen

    def _selection(self) -> Selection:
        with self._grad(), environment(HAL_ATTN_AUTOTUNE="off"):
            return explain(*self.inputs, **self._options)

    def _tuned(self, tick: Callable[[str], None]) -> str | None:
        """What is chosen once the candidates were measured; None where it is not asked for or none takes the shape."""
        if self.wanted.cache is None:
            return None
        tick("tuning")
        with self._grad(), environment(HAL_ATTN_AUTOTUNE="on", HAL_ATTN_CACHE_DIR=self.wanted.cache):
            attempt(partial(self._call, None), None)
            chosen = explain(*self.inputs, **self._options).chosen
        return None if chosen is None else chosen.name

    # One backend

    def _able(self, row: Row, backend: AttentionBackend, selection: Selection) -> _Able:
        """Runs it once, and looks whether it is right."""
        call = partial(self._results, partial(self._call, backend.name))
        error, wrong = self._error(call())
        vendor, failure = attempt(partial(self._vendor, backend, selection), None)
        note = f"the vendor's own call, made again, failed: {shortened(failure, 200)}" if failure else None
        row = replace(row, error=error, wrong=wrong, note=note)
        if self.wanted.memory:
            peak = None if vendor is None else float(timing.peak_bytes(self.device, vendor))
            row = replace(row, peak=float(timing.peak_bytes(self.device, call)), vendor_peak=peak)
        return _Able(row, call, vendor)

    def _vendor(self, backend: AttentionBackend, selection: Selection) -> Call | None:
        with self._grad():
            made = vendor_call(backend, selection.request, *cast(Tensors, self.inputs), self._sequences)
        if made is None:
            return None
        if self.passes == FORWARD:
            call: Call = partial(_without_grad, made)
        else:
            again, leaves = made.with_gradients()
            gradient = torch.ones_like(output_of(again()))
            call = partial(_gradients, again, leaves, gradient)
        call()
        return call

    def _call(self, backend: str | None) -> Tensor:
        options: dict[str, Any] = {"causal": self.problem.causal, "backend": backend}
        if self._sequences is None:
            return cast(Tensor, attention(*self.inputs, **options))
        return cast(Tensor, varlen_attention(*self.inputs, sequences=self._sequences, **options))

    def _results(self, attend: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        """The output, and with the backward pass the gradients of query, key and value."""
        with self._grad():
            output = attend()
            if self.passes == FORWARD:
                return (output,)
            return (output.detach(), *torch.autograd.grad(output, self.inputs, self.gradient))

    @contextmanager
    def _grad(self) -> Iterator[None]:
        with torch.set_grad_enabled(self.passes == BOTH):
            yield

    @cached_property
    def _sequences(self) -> PackedSequences | None:
        return self.problem.sequences(self.device) if self.problem.packed else None

    @property
    def _options(self) -> dict[str, Any]:
        packed = {} if self._sequences is None else {"sequences": self._sequences}
        return {"causal": self.problem.causal, **packed}

    # Whether it is right

    def _error(self, found: tuple[Tensor, ...]) -> tuple[float, bool]:
        """The largest difference from the oracle at the sampled rows, and whether it is too large."""
        sampled = self.problem.sampled().to(self.device)
        rows = [tensor.reshape(-1, *tensor.shape[-2:])[sampled].to(self._wide) for tensor in found[:2]]
        differences = [float((mine - exact).abs().max()) for mine, exact in zip(rows, self._exact, strict=True)]
        scales = [max(float(exact.abs().max()), 1e-30) for exact in self._exact]
        tolerance = _TOLERANCE[self.problem.dtype]
        right = all(error <= tolerance * scale for error, scale in zip(differences, scales, strict=True))
        return max(differences), not right

    @cached_property
    def _exact(self) -> list[Tensor]:
        """The output at the sampled rows, and with the backward pass the gradient of query there."""
        query, key, value = (tensor.detach() for tensor in self.inputs)
        if self.passes == FORWARD:
            return [self.problem.exact(query, key, value, self._wide)]
        with torch.enable_grad():
            query = query.to(self._wide).requires_grad_()
            output = self.problem.exact(query, key, value, self._wide)
            sampled = self.problem.sampled().to(self.device)
            given = self.gradient.reshape(-1, *self.gradient.shape[-2:])[sampled].to(self._wide)
            (gradient,) = torch.autograd.grad(output, query, given)
        return [output.detach(), gradient.reshape(-1, *gradient.shape[-2:])[sampled]]

    @property
    def _wide(self) -> torch.dtype:
        """float64, but where a device has none."""
        return torch.float64 if self.device.type in ("cpu", "cuda") else torch.float32

    # How fast it is

    def _timed(self, able: list[_Able]) -> Iterator[Row]:
        if not able:
            return
        calls: dict[str, Call] = {}
        for one in able:
            calls[one.row.backend] = one.call
            if one.vendor is not None:
                calls[f"vendor's {one.row.backend}"] = one.vendor
        samples = timing.interleaved(self.device, calls, self.wanted.rounds)
        median = {name: statistics.median(found) for name, found in samples.items()}
        for one in able:
            name = one.row.backend
            ms = median[name]
            rate = self.problem.operations * OPERATIONS[self.passes] / ms / 1e9
            yield replace(one.row, ms=ms, teraflops=rate, vendor_ms=median.get(f"vendor's {name}"))


def _without_grad(call: VendorCall) -> object:
    with torch.no_grad():
        return call()


def _gradients(call: VendorCall, leaves: tuple[Tensor, ...], gradient: Tensor) -> object:
    with torch.enable_grad():
        return torch.autograd.grad(output_of(call()), leaves, gradient, allow_unused=True)
