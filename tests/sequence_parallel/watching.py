"""What a rank does, watched from within: what it sends to whom, what its kernels get, and in which order."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from unittest import mock

import torch.distributed as dist

from hal_attn.sequence_parallel import kernel


class Log:
    """Of one rank.

    Attributes:
        sent: by destination (its rank in the whole group, for two-sided operations; in its own group, for collectives)
            bytes that left this rank, one entry an operation.
        sequences: (query, key) lengths of each packed sequence that reached a kernel; backends: its names.
        events: "travel", "attend" and "arrived", in order; the same one after another once.
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
    all_to_all, two_sided, attend = dist.all_to_all_single, dist.batch_isend_irecv, kernel.varlen_attention

    def watched_all_to_all(received, sent, receives, sends, *, group, async_op):
        own = dist.get_rank(group)
        log.sent.append({to: n * sent.element_size() for to, n in enumerate(sends) if n and to != own})
        log.happened("travel")
        return _Work(all_to_all(received, sent, receives, sends, group=group, async_op=async_op), log)

    def watched_two_sided(operations):
        leaving = [op for op in operations if op.op is dist.isend]
        log.sent.append({op.peer: op.tensor.numel() * op.tensor.element_size() for op in leaving})
        log.happened("travel")
        return [_Work(work, log) for work in two_sided(operations)]

    def watched_attend(*args, sequences, **options):
        log.sequences += zip(sequences.lengths, sequences.lengths_k, strict=True)
        log.backends.add(options["backend"])
        log.happened("attend")
        return attend(*args, sequences=sequences, **options)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(dist, "all_to_all_single", watched_all_to_all))
        stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", watched_two_sided))
        stack.enter_context(mock.patch.object(kernel, "varlen_attention", watched_attend))
        yield log
