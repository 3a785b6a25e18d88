"""The simulated operators as PyTorch operators: the dispatcher checks each call against torch_npu's own schemas.

```
library=simulated   torch.ops.hal_attn_simulated_npu_7_3.npu_fusion_attention   schemas of that release, defined here
library=torch_npu   torch.ops.npu.npu_fusion_attention                          an installed torch_npu's, its kernels
                                                                                for CPU tensors from here
```
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from hal_attn.simulation.spec import SimulationSpec
from hal_attn_ascend.simulation import fusion, inference, prompt
from hal_attn_ascend.simulation.autograd import fusion_with_gradients
from hal_attn_ascend.simulation.device import CURRENT, Device
from hal_attn_ascend.simulation.schemas import RELEASES, schemas

NAMESPACE = "hal_attn_simulated_npu"
FUSION = "npu_fusion_attention"


@dataclass(frozen=True)
class SimulatedOperator:
    """One operator, called as the one of a device."""

    packet: Any
    device: Device

    @property
    def default(self) -> Any:
        """The operator's overload, which has its schema."""
        return self.packet.default

    def __call__(self, *arguments: object, **options: object) -> Any:
        token = CURRENT.set(self.device)
        try:
            return self.packet(*arguments, **options)
        finally:
            CURRENT.reset(token)


class SimulatedOperators:
    """A namespace of operators like `torch.ops.npu`, of one device and release.

    Args:
        namespace: the registered operators, such as `torch.ops.npu`.
        names: of those that the release has.
        device: whose rules they follow.
    """

    def __init__(self, namespace: Any, names: tuple[str, ...], device: Device) -> None:
        for name in names:
            setattr(self, name, SimulatedOperator(getattr(namespace, name), device))

    @classmethod
    def of(cls, spec: SimulationSpec) -> SimulatedOperators:
        """The operators of the simulated device; ImportError where a torch_npu is asked for that is not installed."""
        empty = Device().empty_lse if spec.empty_lse is None else spec.empty_lse
        release = spec.choices["torch_npu"]
        namespace, _ = _of_torch_npu() if spec.choices["library"] == "torch_npu" else _defined(release)
        return cls(namespace, tuple(schemas(release)), Device(spec.generation, empty))


@cache
def _defined(release: str) -> tuple[Any, torch.library.Library]:
    """The operators of one release, defined in a namespace of their own, once a process; the Library beside them keeps
    the registration alive."""
    name = f"{NAMESPACE}_{release.replace('.', '_')}"
    library = torch.library.Library(name, "DEF")
    found = schemas(release)
    for schema in found.values():
        library.define(schema)
    _implement(library, name, tuple(found))
    return getattr(torch.ops, name), library


@cache
def _of_torch_npu() -> tuple[Any, torch.library.Library]:
    """The operators of the installed torch_npu, with simulated kernels for CPU tensors; once a process."""
    from hal_attn_ascend.operators import torch_npu_operators

    operators = torch_npu_operators()
    if getattr(torch, "npu").is_available():  # noqa: B009  (PyTorch's types do not know it)
        raise RuntimeError("library=torch_npu would replace the kernels of the NPU here; use library=simulated")
    library = torch.library.Library("npu", "IMPL")
    _implement(library, "npu", tuple(schemas(RELEASES[-1])))
    return operators, library


def _implement(library: torch.library.Library, namespace: str, names: tuple[str, ...]) -> None:
    """CPU kernels for the operators of these names, and the gradient of `npu_fusion_attention`."""
    kernels: dict[str, Callable[[dict[str, Any]], Any]] = {
        FUSION: fusion.forward,
        f"{FUSION}_grad": fusion.gradient,
        "npu_fused_infer_attention_score": inference.first_version,
        "npu_fused_infer_attention_score_v2": inference.second_version,
        "npu_prompt_flash_attention": prompt.prompt,
        "npu_incre_flash_attention": prompt.increment,
    }
    operators = getattr(torch.ops, namespace)
    bindings = {name: _binding(getattr(operators, name)) for name in names}
    for name, bind in bindings.items():
        library.impl(name, _kernel(bind, kernels[name]), "CPU")
    if namespace != "npu":
        library.impl(FUSION, fusion_with_gradients(operators, bindings[FUSION]), "AutogradCPU")
        return
    # torch_npu has its own autograd kernel, for NPU tensors. Led there, a CPU tensor goes on to the kernel for NPU
    # tensors, so that is replaced as well; the gradient operator is then called with CPU tensors as they are.
    library.impl(FUSION, _as_on_npu(operators), "AutogradCPU", with_keyset=True)
    library.impl(FUSION, _kernel(bindings[FUSION], kernels[FUSION]), "PrivateUse1")


def _kernel(bind: Callable[..., dict[str, Any]], compute: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    def kernel(*arguments: object, **options: object) -> Any:
        return compute(bind(*arguments, **options))

    return kernel


def _as_on_npu(operators: Any) -> Callable[..., Any]:
    """torch_npu's own autograd kernel, for CPU tensors."""
    of_npu = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradPrivateUse1)
    of_cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCPU)

    def kernel(keys: Any, *arguments: object, **options: object) -> Any:
        return operators.npu_fusion_attention.default.redispatch((keys - of_cpu) | of_npu, *arguments, **options)

    return kernel


def _binding(packet: Any) -> Callable[..., dict[str, Any]]:
    """Names the arguments of a call and adds defaults: the dispatcher gives them by position, without those at the end
    that are equal to their default."""
    parameters = []
    for argument in packet.default._schema.arguments:
        kind = inspect.Parameter.KEYWORD_ONLY if argument.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
        default = argument.default_value if argument.has_default_value() else inspect.Parameter.empty
        parameters.append(inspect.Parameter(argument.name, kind, default=default))
    signature = inspect.Signature(parameters)

    def bind(*arguments: object, **options: object) -> dict[str, Any]:
        bound = signature.bind(*arguments, **options)
        bound.apply_defaults()
        return dict(bound.arguments)

    return bind
