"""Real gloo processes that run functions of the tests: one process a rank, kept from one test to the next.

Processes are forked from one that has imported PyTorch, so a pool starts in a moment and shares its memory. Ranks find
one another by a file. No wait is without a bound: a rank that fails, dies or hangs ends in an error that says how far
each rank came.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

SECONDS = 60
GROUP_SECONDS = 30


@dataclass(frozen=True)
class Outcome:
    """What became of a function on one rank: its value, or what it raised, or "died" or "hung" in `trace`."""

    value: object = None
    error: BaseException | None = None
    trace: str | None = None


class PoolError(AssertionError):
    """A function failed on some rank."""


class Pool:
    """`world` ranks. `group_seconds` is the time after which a collective operation gives up."""

    def __init__(self, world: int, *, group_seconds: float = GROUP_SECONDS):
        self.world, self.group_seconds = world, group_seconds
        self._processes: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        self._folder: tempfile.TemporaryDirectory | None = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function, *args, environ=None) -> list:
        """`function(*args)` on every rank, with these HAL_ATTN_* variables -> by rank, what it returns."""
        outcomes = self.outcomes(function, *args, environ=environ)
        failed = [f"rank {rank}:\n{each.trace}" for rank, each in enumerate(outcomes) if each.trace is not None]
        if failed:
            self.close()  # the ranks may be in the middle of different operations
            raise PoolError("\n".join(failed))
        return [each.value for each in outcomes]

    def errors(self, function, *args, environ=None) -> list[BaseException]:
        """What `function(*args)` raises, on every rank."""
        outcomes = self.outcomes(function, *args, environ=environ)
        if any(each.error is None for each in outcomes):
            self.close()
            told = (f"rank {rank}: {each.trace or 'no error'}" for rank, each in enumerate(outcomes))
            raise PoolError("an error on every rank was expected\n" + "\n".join(told))
        return [each.error for each in outcomes]

    def outcomes(self, function, *args, environ=None, seconds: float = SECONDS) -> list[Outcome]:
        """What becomes of `function(*args)` on each rank. A rank that died or hung is gone with its pool."""
        self._start()
        job = pickle.dumps((function, args, environ or {}))
        begun = time.monotonic()
        found: dict[int, Outcome] = {}
        for rank, (_, connection) in enumerate(self._processes):
            try:
                connection.send_bytes(job)
            except OSError:
                found[rank] = self._died(rank)
        waiting = {c: rank for rank, (_, c) in enumerate(self._processes) if rank not in found}
        while waiting and (left := begun + seconds - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                rank = waiting.pop(connection)
                try:
                    found[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    found[rank] = self._died(rank)
        found |= {rank: self._hung(rank, seconds) for rank in waiting.values()}
        if any(each.trace is not None and each.error is None for each in found.values()):
            self.close()
        return [found[rank] for rank in range(self.world)]

    def close(self) -> None:
        """End the processes."""
        for process, connection in self._processes:
            connection.close()
            process.kill()
        for process, _ in self._processes:
            process.join()
        self._processes = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        if self._processes:
            return
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "hal_attn"])
        for rank in range(self.world):
            here, there = context.Pipe()
            arguments = (there, rank, self.world, self._folder.name, self.group_seconds)
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            there.close()
            self._processes.append((process, here))

    def _died(self, rank: int) -> Outcome:
        process = self._processes[rank][0]
        process.join(5)
        return Outcome(trace=f"died with exit code {process.exitcode}")

    def _hung(self, rank: int, seconds: float) -> Outcome:
        """Where the rank is, by its own word."""
        process, _ = self._processes[rank]
        assert process.pid is not None
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        assert self._folder is not None
        return Outcome(trace=f"no answer in {seconds} s, at\n{_stacks(self._folder.name, rank).read_text()}")


def _stacks(folder: str, rank: int) -> Path:
    return Path(folder, f"stacks-{rank}")


def _work(connection: Connection, rank: int, world: int, folder: str, group_seconds: float) -> None:
    """A process of the pool: what comes in is called, what it gives or raises goes back."""
    with _stacks(folder, rank).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        torch.set_num_threads(1)
        if sys.platform == "linux":
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        place = {"init_method": f"file://{folder}/meeting", "rank": rank, "world_size": world}
        dist.init_process_group("gloo", timeout=timedelta(seconds=group_seconds), **place)
        while True:
            try:
                job = connection.recv_bytes()
            except EOFError:
                break
            connection.send_bytes(_answer(job))
        os._exit(0)


def _answer(job: bytes) -> bytes:
    try:
        function, args, environ = pickle.loads(job)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("HAL_ATTN_")}
        with mock.patch.dict(os.environ, clean | environ, clear=True):
            outcome = Outcome(function(*args))
    except Exception as failure:
        outcome = Outcome(error=failure, trace=traceback.format_exc())
    try:
        return pickle.dumps(outcome)
    except Exception:
        return pickle.dumps(Outcome(error=RuntimeError(repr(outcome.error)), trace=outcome.trace or "not picklable"))
