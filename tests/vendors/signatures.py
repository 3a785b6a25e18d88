"""The vendors' function signatures, read from `signatures/*.json`, for binding and comparing calls.

An id is the name by which a caller reaches the function, such as `flash_attn.flash_attn_func`. Each file holds one
package at one version; `since` on a parameter or a function is the first release that has it. For torch-npu that is
the release of the Ascend Extension for PyTorch, not the version of the wheel.
"""

import ast
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from packaging.version import Version

FOLDER = Path(__file__).parent / "signatures"
KINDS = {
    "positional_or_keyword": inspect.Parameter.POSITIONAL_OR_KEYWORD,
    "keyword_only": inspect.Parameter.KEYWORD_ONLY,
}


@dataclass(frozen=True)
class Function:
    """One vendor function: where it is, its signature and, for an operator, its schema."""

    id: str
    package: str
    version: str
    module: str
    name: str
    source: str | None
    schema: str | None
    since: str | None
    parameters: tuple[Mapping[str, str], ...]
    returns: tuple[Mapping[str, str], ...]


@cache
def functions() -> Mapping[str, Function]:
    """Every function of the data, by id."""
    found = {}
    for path in sorted(FOLDER.glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        for id_, entry in data["functions"].items():
            found[id_] = Function(
                id=id_,
                package=data["package"],
                version=data["version"],
                module=entry["module"],
                name=entry["name"],
                source=entry.get("source"),
                schema=entry.get("schema"),
                since=entry.get("since"),
                parameters=tuple(MappingProxyType(parameter) for parameter in entry["parameters"]),
                returns=tuple(MappingProxyType(returned) for returned in entry["returns"]),
            )
    return MappingProxyType(found)


@cache
def signature(id: str) -> inspect.Signature:
    """The signature of the function: names, kinds and defaults, without annotations."""
    return inspect.Signature(
        [
            inspect.Parameter(
                parameter["name"],
                KINDS[parameter["kind"]],
                default=ast.literal_eval(parameter["default"]) if "default" in parameter else inspect.Parameter.empty,
            )
            for parameter in functions()[id].parameters
        ]
    )


def schema(id: str) -> str:
    """The operator schema of the function, as the dispatcher registers it."""
    found = functions()[id].schema
    if found is None:
        raise KeyError(f"{id} is a Python function, not an operator: use signature({id!r})")
    return found


def bind(id: str, args: Sequence[Any], kwargs: Mapping[str, Any], release: str | None = None) -> inspect.BoundArguments:
    """The call bound to the signature; TypeError for an argument that the function, or its `release`, does not have."""
    function = functions()[id]
    bound = signature(id).bind(*args, **kwargs)
    if release is not None:
        since = {p["name"]: p["since"] for p in function.parameters if "since" in p and p["name"] in bound.arguments}
        if function.since is not None:
            since["the function itself"] = function.since
        late = {name: first for name, first in since.items() if Version(first) > Version(release)}
        if late:
            raise TypeError(f"{id} of {function.package} {release} does not have {late} (name: first release)")
    return bound


def plain(signature: inspect.Signature) -> list[tuple[str, str, Any]]:
    """Name, kind and default of each parameter, which is what a call depends on."""
    return [(p.name, p.kind.name, p.default) for p in signature.parameters.values()]


def assert_same_signature(function: Callable[..., Any], id: str) -> None:
    """The function takes exactly the parameters of the vendor's: names, order, kinds and defaults."""
    assert plain(inspect.signature(function)) == plain(signature(id)), f"{function!r} differs from {id}"
