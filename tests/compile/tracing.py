"""Programs for the tests: compiled in one graph, counted, and run over memory that a compiler would have given away."""

from __future__ import annotations

import torch
import torch._dynamo
import torch._functorch.config
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition


class Program:
    """`function` compiled without a graph break; `graphs` counts how often it was compiled."""

    def __init__(self, function, *, dynamic=None, backend="aot_eager"):
        torch._dynamo.reset()
        self._counter = CompileCounterWithBackend(backend)
        self._compiled = torch.compile(function, backend=self._counter, fullgraph=True, dynamic=dynamic)

    def __call__(self, *arguments, **options):
        return self._compiled(*arguments, **options)

    @property
    def graphs(self):
        return self._counter.frame_count


def leaves(*tensors):
    """Copies that want gradients, where they can have one."""
    return tuple(tensor.detach().clone().requires_grad_(tensor.is_floating_point()) for tensor in tensors)


def gradients(result, inputs, weight=None):
    """Of the outputs times a fixed weight, for all inputs; 0 where nothing depends."""
    outputs = result if isinstance(result, tuple) else (result,)
    loss = 0.0
    for output in outputs:
        own = (
            torch.arange(output.numel(), dtype=torch.float32).reshape(output.shape).sin() if weight is None else weight
        )
        loss = loss + (torch.where(torch.isinf(output), 0.0, output).float() * own).sum()
    return torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)


def same(have, need, what=""):
    """To the bit: it is the same kernel on the same numbers."""
    have, need = (value if isinstance(value, tuple) else (value,) for value in (have, need))
    assert len(have) == len(need)
    for index, (one, other) in enumerate(zip(have, need, strict=True)):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert torch.equal(one, other), f"{what}[{index}]: differs by {(one - other).abs().max()}"


class _Forgetful(fx.Interpreter):
    """Runs a graph and fills each tensor with NaN once nothing in the graph will read it."""

    def __init__(self, module):
        super().__init__(module, garbage_collect_values=False)
        self._order = {node: place for place, node in enumerate(module.graph.nodes)}
        self._last = {node: max((self._order[user] for user in node.users), default=-1) for node in self._order}

    def run_node(self, node):
        result = super().run_node(node)
        self.env[node] = result
        now = self._order[node]
        if node.op in ("placeholder", "output"):
            return result
        # What came from outside is another's, and so is what lies in its memory.
        kept = {
            place
            for other, value in self.env.items()
            if other.op == "placeholder" or self._last[other] > now
            for place in _places(value)
        }
        for read in {node, *node.all_input_nodes}:
            if self._last[read] <= now and read.op != "placeholder":
                for place, tensor in _places(self.env[read]).items():
                    if place not in kept and tensor.is_floating_point():
                        tensor.untyped_storage().fill_(0xFF)
        return result


def _places(value):
    """Tensors in a value, by where their memory is."""
    if isinstance(value, Tensor):
        return {value.untyped_storage().data_ptr(): value} if value.numel() else {}
    if isinstance(value, (tuple, list)):
        return {place: tensor for part in value for place, tensor in _places(part).items()}
    return {}


def _forgetful(module, inputs):
    return make_boxed_func(_Forgetful(module).run)


# Computes again in the backward pass what is cheap, and leaves nothing in memory that the graph does not ask for: what
# an optimising compiler does, without its code generator.
_compile = aot_autograd(
    fw_compiler=_forgetful, bw_compiler=_forgetful, partition_fn=min_cut_rematerialization_partition
)


def forgetful(module, inputs):
    """A compiler for `Program`."""
    # Also what an operator reads, which by default is kept where it was written once.
    with torch._functorch.config.patch(ban_recompute_materialized_backward=False):
        return _compile(module, inputs)
