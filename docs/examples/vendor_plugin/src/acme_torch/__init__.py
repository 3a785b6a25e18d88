"""The stand-in for the vendor's PyTorch extension, as torch_npu is Huawei's: the device "acme", and its kernels.

The device is the CPU under another name. A plugin for a real device has no such package; it requires its vendor's.
"""

from __future__ import annotations

import torch

NAME = "acme"
_FREE = "privateuseone"


def obstacle() -> str:
    """Why there is no device "acme" in this process; empty where there is one."""
    from torch.utils import backend_registration

    taken = torch._C._get_privateuse1_backend_name()
    if taken == NAME:
        return ""
    if taken != _FREE:
        return f"PyTorch has room for one device of others, and {taken} has it"
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        return f"PyTorch {torch.__version__} takes no device that is written in Python"
    return "PyTorch did not load acme_torch: is TORCH_DEVICE_BACKEND_AUTOLOAD=0 set?"


def load() -> None:
    """Gives PyTorch the device, where it has room for one; `import torch` calls this, so it must not fail."""
    from torch.utils import backend_registration

    free = torch._C._get_privateuse1_backend_name() == _FREE
    if free and hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        from acme_torch.device import register

        register(NAME)
