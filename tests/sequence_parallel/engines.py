"""Copy engines without GPUs: ranks map one another's memory as shared files, and a copy is done when it is asked for.

What is real: the slots, their flags and their order, the addresses, and everything above. What is not: that a copy
may also come later, which only a GPU can show.
"""

from __future__ import annotations

import ctypes
import functools
import os
import tempfile
import time
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from hal_attn.sequence_parallel import SequenceParallelGroups, peer_heads, peers, slots

SECONDS = 20


def mapped(group, size, device):
    ranks = range(dist.get_world_size(group))
    handle, path = tempfile.mkstemp()
    os.ftruncate(handle, size)
    os.close(handle)
    paths = [None for _ in ranks]
    dist.all_gather_object(paths, path, group=group)
    memory = [torch.from_file(each, shared=True, size=size, dtype=torch.uint8) for each in paths]
    dist.barrier(group)
    Path(path).unlink()
    return memory, None


def copy(stream, what):
    for row in range(what.rows):
        source, target = what.source + row * what.source_pitch, what.target + row * what.target_pitch
        ctypes.memmove(target, source, what.width)


def wait(stream, flag, number):
    begun = time.monotonic()
    while (ctypes.c_uint32.from_address(flag).value - number) & 0xFFFFFFFF >= 1 << 31:
        assert time.monotonic() < begun + SECONDS, "the flag is never set"
        time.sleep(0)


def set_flag(stream, flag, number):
    ctypes.c_uint32.from_address(flag).value = number & 0xFFFFFFFF


@contextmanager
def engines():
    """Copies work on this rank, for heads of any width."""
    stream = SimpleNamespace(device=torch.device("cpu"), wait_event=lambda event: None)
    event = SimpleNamespace(record=lambda stream: None)
    with ExitStack() as stack:

        def patch(where, **what):
            for name, value in what.items():
                stack.enter_context(mock.patch.object(where, name, value))

        patch(torch.cuda, Stream=lambda device: stream, Event=lambda: event, current_stream=lambda device: stream)
        patch(torch.cuda, synchronize=lambda device: None)
        patch(slots, current=lambda device: nullcontext())
        patch(peers, mapped=mapped, copy=copy, wait=wait, set_flag=set_flag)
        patch(peers.PeerCopies, take=lambda self, tensors: self.unavailable is None)
        patch(peer_heads, _LEAST_WIDTH=1)
        yield


@functools.cache
def groups_with_copies(degrees):
    """The groups of a pool's rank, made once."""
    return SequenceParallelGroups.create(degrees.ulysses, degrees.ring, degrees.kv_gather, peer_copies=True)


def posted(groups):
    """How many exchanges went by copies."""
    return sum(way._count for way in (groups.peers, groups.peers_of_heads) if way is not None)
