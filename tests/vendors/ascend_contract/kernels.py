"""CPU kernels for torch_npu's operators, reached through its own dispatcher and its own autograd.

torch_npu registers autograd for `npu_fusion_attention` under AutogradPrivateUse1 alone. A CPU tensor goes by
AutogradCPU, where nothing is registered: the forward kernel would run as plain PyTorch code, which autograd then
records, and `npu_fusion_attention_grad` would never be called. `through_vendor_autograd` sends CPU tensors there.
"""

from collections.abc import Callable
from typing import Any

import torch

FORWARD = "npu_fusion_attention"
BACKWARD = "npu_fusion_attention_grad"


def through_vendor_autograd(
    library: torch.library.Library, forward: Callable[..., Any], backward: Callable[..., Any]
) -> None:
    """Run `npu_fusion_attention` on CPU tensors by `forward` and `backward`, joined by torch_npu's autograd.

    The keys are those that a tensor on an NPU has. Below autograd the PrivateUse1 bit outranks CPU, so that `forward`
    takes the place of the NPU's kernel; the backward is a fresh call with CPU tensors, which finds `backward` by CPU.
    """
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradPrivateUse1) | torch._C.DispatchKeySet(
        torch._C.DispatchKey.PrivateUse1
    )
    operator = getattr(torch.ops.npu, FORWARD).default
    library.impl(FORWARD, forward, "CPU", allow_override=True)
    library.impl(FORWARD, forward, "PrivateUse1", allow_override=True)
    library.impl(BACKWARD, backward, "CPU", allow_override=True)
    library.impl(
        FORWARD, lambda *args, **kwargs: operator.redispatch(keys, *args, **kwargs), "AutogradCPU", allow_override=True
    )
