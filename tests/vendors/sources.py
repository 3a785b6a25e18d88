"""The vendors' Python sources, unpacked by `ci/vendor_sources.py`, read with `ast` and never imported."""

import ast
import inspect
import os
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

from tests.vendors.signatures import Function

VARIABLE = "VENDOR_SOURCES"
ROOT = Path(__file__).parents[2]
DEFAULT = ROOT / ".venv" / "vendor-sources"


def folder(package: str) -> Path:
    """The folder with the package's sources; an assertion says how to fetch them when it is not there."""
    root = Path(os.environ.get(VARIABLE, DEFAULT))
    assert (root / package).is_dir(), (
        f"no sources of {package} in {root}: fetch them with `python3 ci/vendor_sources.py {root}`, "
        f"or name another folder in {VARIABLE}"
    )
    return root / package


def version(package: str) -> str:
    """The version of the package whose sources lie in its folder."""
    (distribution,) = distributions(path=[str(folder(package))])
    return distribution.version


def signature(function: Function) -> inspect.Signature:
    """The signature that the package's source gives the function, defaults as values where they are literals."""
    path = folder(function.package) / str(function.source)
    found = [node for node in definitions(path) if node.name == function.name]
    assert found, f"{function.source} of {function.package} {version(function.package)} defines no {function.name}"
    return _signature(found[-1])


def meta_signature(path: Path, operator: str) -> inspect.Signature:
    """The signature of the meta kernel registered with `@impl(library, operator)`."""
    found = [
        node
        for node in definitions(path)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call)
        and any(isinstance(argument, ast.Constant) and argument.value == operator for argument in decorator.args)
    ]
    assert found, f"{path} registers no meta kernel for {operator}"
    return _signature(found[-1])


def exports(function: Function) -> bool:
    """Whether the module a caller imports from defines the function or imports it, by name or by `*`."""
    base = folder(function.package) / Path(*function.module.split("."))
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    origin = str(Path(str(function.source)).with_suffix("")).replace("/", ".")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name == function.name:
            return True
        if isinstance(node, ast.ImportFrom):
            package = function.module if path.name == "__init__.py" else function.module.rpartition(".")[0]
            module = f"{package}.{node.module}" if node.level == 1 else node.module
            if module == origin and {alias.name for alias in node.names} & {"*", function.name}:
                return True
    return False


def definitions(path: Path) -> Iterator[ast.FunctionDef]:
    """Every function definition of the file, in order."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            yield node


def _signature(node: ast.FunctionDef) -> inspect.Signature:
    positional = node.args.posonlyargs + node.args.args
    required: list[ast.expr | None] = [None] * (len(positional) - len(node.args.defaults))
    defaults = required + node.args.defaults
    parameters = [
        inspect.Parameter(argument.arg, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=_value(default))
        for argument, default in zip(positional, defaults, strict=True)
    ]
    parameters += [
        inspect.Parameter(argument.arg, inspect.Parameter.KEYWORD_ONLY, default=_value(default))
        for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    ]
    for star, kind in (
        (node.args.vararg, inspect.Parameter.VAR_POSITIONAL),
        (node.args.kwarg, inspect.Parameter.VAR_KEYWORD),
    ):
        if star is not None:
            parameters.append(inspect.Parameter(star.arg, kind))
    return inspect.Signature(sorted(parameters, key=lambda parameter: parameter.kind))


def _value(default: ast.expr | None) -> object:
    if default is None:
        return inspect.Parameter.empty
    try:
        return ast.literal_eval(default)
    except ValueError:
        return ast.unparse(default)
