"""What a rank does, watched from within: what it sends to whom, what its kernels get, and in which order."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from unittest import mock

import torch.distributed as dist

from hal_attn.sequence_parallel import kernel


class Log:
    """Of one rank.

    Attributes:
        sent: by destination (its rank in its own group) bytes that left this rank, one entry for operations
            that leave together.
        sequences: (query, key) lengths of each packed sequence that reached a kernel; backends: its names.
        events: "travel", "attend" (also for gradients) and "arrived", in order; the same one after another once.
    """

    def __init__(self):
        self.sent, self.sequences, self.backends, self.events = [], [], set(), []

    def happened(self, event):
        if self.events[-1:] != [event]:
            self.events.append(event)


class _Work:
    def __init__(self, work, log):
        self._work, self._log = work, log

    def wait(self):
        self._log.happened("arrived")
        return self._work.wait()


@contextmanager
def watching():
    """A `Log` of what happens within."""
    log = Log()
    all_to_all, attend, gradients = dist.all_to_all_single, kernel.varlen_attention, kernel._packed_gradients

    def watched_all_to_all(received, sent, receives, sends, *, group, async_op):
        own = dist.get_rank(group)
        leaving = {to: n * sent.element_size() for to, n in enumerate(sends) if n and to != own}
        if log.events[-1:] == ["travel"]:
            before = log.sent.pop()
            leaving = {to: before.get(to, 0) + leaving.get(to, 0) for to in {**before, **leaving}}
        log.sent.append(leaving)
        log.happened("travel")
        return _Work(all_to_all(received, sent, receives, sends, group=group, async_op=async_op), log)

    def watched_attend(*args, sequences, **options):
        log.sequences += zip(sequences.lengths, sequences.lengths_k, strict=True)
        log.backends.add(options["backend"])
        log.happened("attend")
        return attend(*args, sequences=sequences, **options)

    def watched_gradients(*args):
        log.happened("attend")
        return gradients(*args)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(kernel, "_packed_gradients", watched_gradients))
        stack.enter_context(mock.patch.object(dist, "all_to_all_single", watched_all_to_all))
        stack.enter_context(mock.patch.object(kernel, "varlen_attention", watched_attend))
        yield log
