"""What a runner has to know of each platform before anything is installed there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Platform:
    """One platform.

    `device_files` are patterns below `/`, each of which must match; `tool` is the vendor's command that lists devices;
    `extras` are this project's; `packages` are installed before it, one by one, PyTorch first. Where `own_torch` is
    true the interpreter's PyTorch is kept, for the package index has no build for the platform. `set_env` is the
    vendor's script that sets its variables, read unless `home` is set already. `hide` are the variables that hide the
    devices when set to `hidden`.
    """

    name: str
    remedy: str = ""
    device_files: tuple[str, ...] = ()
    tool: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    packages: tuple[str, ...] = ("torch",)
    own_torch: bool = False
    home: str = ""
    set_env: str = ""
    hide: tuple[str, ...] = ()
    # HIP takes an empty list for none given (ROCm/hip issue 3001); an index that is invalid hides all from it on.
    hidden: str = "-1"

    @property
    def constraints(self) -> Path:
        """The pinned versions for this platform."""
        return ROOT / "ci" / f"constraints-{self.name}.txt"


GUIDE = "docs/runners.md lists what a runner needs"
PLATFORMS = {
    platform.name: platform
    for platform in (
        Platform("cpu"),
        Platform(
            "cuda",
            f"install NVIDIA's driver; in a container start it with --gpus all (nvidia-container-toolkit); {GUIDE}",
            device_files=("dev/nvidia[0-9]*", "dev/nvidiactl"),
            tool=("nvidia-smi", "-L"),
            extras=("cuda", "cuda-vision"),
            hide=("CUDA_VISIBLE_DEVICES",),
        ),
        Platform(
            "rocm",
            f"install amdgpu-dkms; in a container add --device /dev/kfd --device /dev/dri, and the groups video and "
            f"render; {GUIDE}",
            device_files=("dev/kfd", "dev/dri/renderD*"),
            tool=("rocminfo",),
            extras=("rocm",),
            packages=(),
            own_torch=True,
            hide=("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
        ),
        Platform(
            "ascend",
            f"install the Ascend driver; in a container add --device /dev/davinci0 and those of the manager, and mount "
            f"the driver; {GUIDE}",
            device_files=("dev/davinci[0-9]*", "dev/davinci_manager", "dev/devmm_svm", "dev/hisi_hdc"),
            tool=("npu-smi", "info"),
            extras=("ascend",),
            packages=("torch", "torch-npu"),
            home="ASCEND_HOME_PATH",
            set_env="/usr/local/Ascend/ascend-toolkit/set_env.sh",
            hide=("ASCEND_RT_VISIBLE_DEVICES",),
            hidden="",
        ),
    )
}
SIMULATED = ("ascend", "cuda", "rocm")
