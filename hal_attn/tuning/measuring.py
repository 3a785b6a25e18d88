"""One measurement: candidates answer the same call on values made for it, are compared, and race.

The caller notices nothing but the time: no graph, gradient or hook of its tensors is touched, no random number of its
generators is drawn, and what the candidates made is freed.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hal_attn.backend import AttentionBackend
from hal_attn.guard import attempt
from hal_attn.request import AttentionRequest
from hal_attn.tuning.comparison import Result, odd_ones, some_rows
from hal_attn.tuning.race import race
from hal_attn.tuning.record import Record

_log = logging.getLogger("hal_attn")

SEED = 0


@dataclass(frozen=True)
class Trial:
    """A call that candidates may be tried with.

    Attributes:
        call_of: the call of a backend: `call(query, key, value, *rest, **options)`.
        tensors: query, key and value as the caller has them; only their shapes and strides are used.
        rest: what follows them: the sequences of a packed call.
        options: the option tensors, whose values are used.
    """

    call_of: Callable[[AttentionBackend], Callable[..., Any]]
    tensors: tuple[Tensor, Tensor, Tensor]
    rest: tuple[object, ...] = ()
    options: Mapping[str, Tensor] | None = None

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.tensors[0].device

    def obstacle(self) -> str:
        """Why nothing can be measured at this moment; "" where it can."""
        if torch.compiler.is_compiling():
            return "torch.compile is tracing this call"
        if any(type(tensor) not in (Tensor, torch.nn.Parameter) for tensor in self.tensors):
            return f"query is a {type(self.tensors[0]).__name__}, which may stand for something else than its values"
        if torch._C._len_torch_dispatch_stack():
            return "a TorchDispatchMode is watching this call"
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return "a transform of torch.func is tracing this call"
        module = _module(self.device)
        capturing = getattr(module, "is_current_stream_capturing", None)
        if capturing is not None and capturing():
            return "a graph is being captured on this stream"
        return ""

    def wait(self) -> None:
        """For what the caller queued before, so that a measurement depends on nobody else."""
        module = _module(self.device)
        if module is not None:
            with module.device(self.device):
                # Not by the stream, whose wait PyTorch reports where the caller asked it to report waits.
                event = module.Event()
                event.record()
                event.synchronize()


def _module(device: torch.device) -> Any:
    """PyTorch's module for the device, as `torch.cuda`; None for the CPU."""
    return None if device.type == "cpu" else torch.get_device_module(device)


def measure(able: Sequence[AttentionBackend], trial: Trial, request: AttentionRequest) -> tuple[Record, bool]:
    """The record of `able`, in the platform's order, and whether it is worth keeping: a candidate that found too little
    memory at this moment may be the best at another."""
    with _undisturbed(trial, request):
        runs, results, left_out = _first_runs(able, trial, request)
        left_out |= odd_ones(results, request.dtype)
        del results
        timer = _timer(trial.device)
        outcome = race(
            [name for name in runs if name not in left_out], lambda name, calls: timer(runs[name], calls) / calls
        )
        left_out |= outcome.failures
    for name, reason in left_out.items():
        _log.warning("%s is left out of the measurement: %s", name, reason)
    when = datetime.now(timezone.utc).isoformat(timespec="seconds")
    times = tuple(sorted(outcome.milliseconds.items(), key=lambda pair: pair[1]))
    _log.info("measured %s for %s", ", ".join(f"{name} {ms:.4g} ms" for name, ms in times), request.describe())
    short = any("OutOfMemoryError" in reason for reason in left_out.values())
    return Record(times, tuple(left_out.items()), outcome.rounds, when), not short


Run = Callable[[], Result]


def _first_runs(
    able: Sequence[AttentionBackend], trial: Trial, request: AttentionRequest
) -> tuple[dict[str, Run], dict[str, Result], dict[str, str]]:
    """What repeats the call, a copy of (some rows of) its first result, and why it failed, by name. The first run
    compiles what a library compiles late."""
    tensors, options, cotangent = _values(trial, request)
    runs: dict[str, Run] = {}
    results: dict[str, Result] = {}
    failures: dict[str, str] = {}
    for backend in able:
        run, failure = attempt(partial(_run_of, backend, trial, tensors, options, cotangent, request), None)
        if run is not None:
            result, failure = attempt(partial(_looked_at, run), None)
            if result is not None:
                runs[backend.name], results[backend.name] = run, result
        if failure:
            failures[backend.name] = f"it failed: {failure}"
    return runs, results, failures


def _looked_at(run: Run) -> Result:
    return {part: some_rows(tensor) for part, tensor in run().items()}


def _values(trial: Trial, request: AttentionRequest) -> tuple[tuple[Tensor, ...], dict[str, Tensor], Tensor | None]:
    """Query, key and value with normal values, the options, and a gradient of the output where one is wanted.

    The caller's own values may be zeros of a warm-up, which cost less and on which all kernels agree, or not finite.
    """
    generator = torch.Generator(trial.device).manual_seed(SEED)

    def like(tensor: Tensor) -> Tensor:
        shared = any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        made = torch.empty_like(tensor, memory_format=torch.contiguous_format) if shared else _same_strides(tensor)
        return made.normal_(generator=generator).requires_grad_(tensor.requires_grad and request.wants_gradient)

    options = {
        name: tensor.detach().requires_grad_(name in request.needs_option_grad)
        for name, tensor in (trial.options or {}).items()
    }
    tensors = tuple(like(tensor) for tensor in trial.tensors)
    if not request.wants_gradient:
        return tensors, options, None
    query, value = trial.tensors[0], trial.tensors[2]
    cotangent = query.new_empty(*query.shape[:-1], value.shape[-1]).normal_(generator=generator)
    return tensors, options, cotangent


def _same_strides(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _run_of(
    backend: AttentionBackend,
    trial: Trial,
    tensors: tuple[Tensor, ...],
    options: Mapping[str, Tensor],
    cotangent: Tensor | None,
    request: AttentionRequest,
) -> Run:
    """The call and, where gradients are wanted, its backward pass."""
    call = trial.call_of(backend)
    names = ("query", "key", "value", *options)
    leaves = {name: t for name, t in zip(names, (*tensors, *options.values()), strict=True) if t.requires_grad}

    def run() -> Result:
        made = call(*tensors, *trial.rest, **options)
        output, lse = made if request.return_lse else (made, None)
        result = {"output": output.detach()} | ({} if lse is None else {"LSE": lse.detach()})
        if cotangent is not None and leaves:
            found = torch.autograd.grad(output, list(leaves.values()), cotangent)
            result |= {f"gradient of {name}": gradient for name, gradient in zip(leaves, found, strict=True)}
        return result

    return run


@contextmanager
def _undisturbed(trial: Trial, request: AttentionRequest) -> Iterator[None]:
    """The caller's device, generators, hooks and modes as they were."""
    device, module = trial.device, _module(trial.device)
    with ExitStack() as stack:
        if module is not None:
            stack.enter_context(module.device(device))
        # Vendors' kernels may draw or advance random numbers even where they drop nothing.
        devices = [] if module is None else [device.index if device.index is not None else module.current_device()]
        stack.enter_context(torch.random.fork_rng(devices, device_type="cuda" if module is None else device.type))
        stack.enter_context(torch.set_grad_enabled(request.wants_gradient))
        # Activation checkpointing and offloading count what is saved under them.
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is))
        if device.type == "cuda":
            stack.enter_context(_allowed_to_wait())
        yield


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


@contextmanager
def _allowed_to_wait() -> Iterator[None]:
    """A measurement waits for the device, also where `torch.cuda.set_sync_debug_mode` has that reported."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


Timer = Callable[[Callable[[], object], int], float]


def _timer(device: torch.device) -> Timer:
    """Milliseconds that `calls` calls in a row take: by events of the device, on the CPU by the clock."""
    return _time_on_host if device.type == "cpu" else partial(_time_on_device, torch.get_device_module(device).Event)


def _time_on_host(run: Callable[[], object], calls: int) -> float:
    if calls > 1:
        run()
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - begin) * 1e3


def _time_on_device(event: Callable[..., Any], run: Callable[[], object], calls: int) -> float:
    """One call before leaves each candidate the caches as it leaves them itself, and the device busy while the host
    queues the first that counts."""
    start, end = event(enable_timing=True), event(enable_timing=True)
    run()
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    elapsed = float(start.elapsed_time(end))
    return elapsed if elapsed > 0 else math.ulp(1.0)
