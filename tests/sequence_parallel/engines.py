"""Copy engines without GPUs: ranks map one another's memory as shared files; side streams are threads that are late.

What is real: the slots, their flags and their order, the addresses, and everything above. The main stream is the
caller's own thread: what it is given is done at once, so nothing here can read too early what a kernel writes late.
"""

from __future__ import annotations

import ctypes
import functools
import os
import queue
import random
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from hal_attn.sequence_parallel import SequenceParallelGroups, peer_heads, peers, slots

SECONDS = 50


class Side:
    """A stream of the device, one thing after another, each at any time."""

    def __init__(self, device):
        self.device, self._waiting = torch.device(device), queue.Queue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self):
        while True:
            action = self._waiting.get()
            if random.random() < 0.3:
                time.sleep(random.random() / 250)
            action()

    def put(self, action):
        self._waiting.put(action)

    def wait_event(self, event):
        """The main stream is never behind."""

    def end(self):
        """Everything that was put is done."""
        event = Event()
        event.record(self)
        event.wait()


class Main:
    """The current stream, which is never behind what the host gave it."""

    device = torch.device("cpu")

    def put(self, action):
        action()

    def wait_event(self, event):
        event.wait()


class Event:
    def __init__(self):
        self._reached = threading.Event()
        self._reached.set()

    def record(self, stream):
        reached = self._reached = threading.Event()
        stream.put(reached.set)

    def wait(self):
        assert self._reached.wait(SECONDS), "the side stream is stuck"


def mapped(group, size, device, count):
    ranks = range(dist.get_world_size(group))
    handle, path = tempfile.mkstemp()
    os.ftruncate(handle, size)
    os.close(handle)
    paths = [None for _ in ranks]
    dist.all_gather_object(paths, path, group=group)
    memory = [torch.from_file(each, shared=True, size=size, dtype=torch.uint8) for each in paths]
    flags = memory[dist.get_rank(group)][: slots.flags_size(len(ranks))]
    flags.view(torch.int32).fill_(slots.as_int32(count))
    dist.barrier(group)
    Path(path).unlink()
    return memory, None


def copy(stream, what):
    if what.rows > 1 and what.width:
        assert min(what.source_pitch, what.target_pitch) >= what.width, "rows that lie on one another"

    def rows():
        for row in range(what.rows):
            source, target = what.source + row * what.source_pitch, what.target + row * what.target_pitch
            ctypes.memmove(target, source, what.width)

    stream.put(rows)


def wait(stream, flag, number):
    def reached():
        begun = time.monotonic()
        while (ctypes.c_uint32.from_address(flag).value - number) & 0xFFFFFFFF >= 1 << 31:
            assert time.monotonic() < begun + SECONDS, "the flag is never set"
            time.sleep(0)

    stream.put(reached)


def set_flag(stream, flag, number):
    def write():
        ctypes.c_uint32.from_address(flag).value = number & 0xFFFFFFFF

    stream.put(write)


@contextmanager
def engines(least=1):
    """Copies work on this rank, for heads of at least so many bytes. Afterwards nothing is under way."""
    main, sides = Main(), {way._slots.stream for way in _ALL if way._slots is not None}

    def side(device):
        made = Side(device)
        sides.add(made)
        return made

    def synchronize(device=None):
        for each in sides:
            each.end()

    with ExitStack() as stack:

        def patch(where, **what):
            for name, value in what.items():
                stack.enter_context(mock.patch.object(where, name, value))

        patch(torch.cuda, Stream=side, Event=Event, current_stream=lambda device: main, synchronize=synchronize)
        patch(slots, current=lambda device: nullcontext())
        patch(peers, mapped=mapped, copy=copy, wait=wait, set_flag=set_flag)
        patch(peers.PeerCopies, take=lambda self, tensors: self.unavailable is None)
        patch(peer_heads, _LEAST_WIDTH=least)
        yield
        synchronize()


def new_groups(degrees):
    """Groups with copies."""
    return SequenceParallelGroups.create(degrees.ulysses, degrees.ring, degrees.kv_gather, peer_copies=True)


_ALL = []


@functools.cache
def groups_with_copies(degrees):
    """Of a pool's rank, made once."""
    made = new_groups(degrees)
    _ALL.extend(ways(made))
    return made


def ways(groups):
    """Its copies, of keys and of heads."""
    return [way for way in (groups.peers, groups.peers_of_heads) if way is not None]


def posted(groups):
    """How many exchanges went by copies."""
    return sum(way._count for way in ways(groups))
