"""The conformance kit under pytest: the option `--hal-attn-backend NAME`, and the class behind
`hal_attn.testing.plugin.BackendConformance`.

pytest loads this in every run of an environment that has hal_attn, whatever is tested there. So it is a package of its
own, outside hal_attn, and PyTorch and the kit are imported only where their checks are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

if TYPE_CHECKING:
    import torch

    from hal_attn.backend import AttentionBackend
    from hal_attn.platform import Platform
    from hal_attn.testing.report import Effort
    from hal_attn.testing.targets import Item

SUITE = Path(__file__).with_name("suite.py")


class BackendConformance:
    """Checks one backend; give a subclass a name that pytest collects.

    Attributes:
        backend: its registered name, an instance, or what makes one (its class).
        platform: a platform's name or instance; None is the one that owns the backend, else the CPU's. With
            HAL_ATTN_SIMULATE, the simulated platform where it has the backend.
        device: where the tensors are; None is the platform's first device.
        effort: "quick" or "full"; `--hal-attn-effort` goes before it.
        tolerances: by dtype, how many times the error of the precision rule is allowed, in the place of what the
            backend declares itself.
    """

    backend: ClassVar[str | AttentionBackend | Callable[[], AttentionBackend]]
    platform: ClassVar[str | Platform | None] = None
    device: ClassVar[str | None] = None
    effort: ClassVar[Effort] = "quick"
    tolerances: ClassVar[Mapping[torch.dtype, float]] = {}

    def test_conforms(self, conformance_check: Item) -> None:
        """One check of the kit."""
        __tracebackhide__ = True
        check = conformance_check.check()
        if check.status == "not run":
            pytest.skip(check.message)
        if check.status == "failed":
            call = f"\ncall: {check.request}" if check.request else ""
            pytest.fail(f"{check.backend} on {check.platform}, {check.name}: {check.message}{call}", pytrace=False)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the kit."""
    group = parser.getgroup("hal_attn", "conformance of attention backends")
    group.addoption(
        "--hal-attn-backend",
        action="append",
        metavar="NAME",
        help="check this backend, registered with hal_attn; may be given more than once",
    )
    group.addoption(
        "--hal-attn-effort", choices=("quick", "full"), help="quick: each feature once; full: in every dtype too"
    )


def pytest_configure(config: pytest.Config) -> None:
    """With `--hal-attn-backend`, the kit's own tests are collected: alone, or beside the paths that were given."""
    if not config.getoption("hal_attn_backend"):
        return
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args.clear()
    config.args.append(str(SUITE))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each check of the backend that a subclass names."""
    cls = metafunc.cls
    if cls is None or not issubclass(cls, BackendConformance) or "conformance_check" not in metafunc.fixturenames:
        return
    items = _items(cls, metafunc.config)
    metafunc.parametrize("conformance_check", items, ids=[item.name for item in items])


def _items(cls: Any, config: pytest.Config) -> list[Item]:
    from hal_attn.testing.targets import items

    effort = config.getoption("hal_attn_effort") or cls.effort
    if hasattr(cls, "backend"):
        return items(cls.backend, cls.platform, cls.device, effort, cls.tolerances)
    names: list[str] = config.getoption("hal_attn_backend") or []
    if not names:
        raise pytest.UsageError(f"{cls.__name__}.backend: not given; allowed: a backend's name, an instance or a class")
    return [item for name in names for item in items(name, None, None, effort, {}, prefix=f"{name}: ")]
