"""The code of the vendor tutorial, which is that of the example in `docs/examples/vendor_plugin`.

`python -m tests.docs_files` writes it into the page, between `<!-- file: PATH NAME... -->` and `<!-- end -->`;
`test_docs` holds the page to it. Without names it is the whole file; a name is a class, a function or a method of a
Python file, or a section of a TOML file.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "bring-a-vendor.md"
EXAMPLE = DOCS / "examples" / "vendor_plugin"
PLACE = re.compile(r"<!-- file: ([^\n]*) -->\n(.*?)<!-- end -->\n", re.DOTALL)
LANGUAGES = {".py": "python", ".toml": "toml", "": "sh", ".yml": "yaml"}


def block(place: str) -> str:
    """The fenced block of a place, its path in the first line."""
    path, *names = place.split()
    file = EXAMPLE / path
    parts = [_part(file, name) for name in names] or [file.read_text()]
    body = "\n\n".join(part.strip("\n") for part in parts)
    return f"```{LANGUAGES[file.suffix]}\n# {path}\n{body}\n```\n"


def _part(file: Path, name: str) -> str:
    return _section(file, name) if file.suffix == ".toml" else _definition(file, name)


def _section(file: Path, name: str) -> str:
    found = re.search(rf"(?:^#[^\n]*\n)*^\[{re.escape(name)}\]\n(?:[^\[#\n][^\n]*\n)+", file.read_text(), re.MULTILINE)
    assert found is not None, f"{file} has no section {name}"
    return found[0]


def _definition(file: Path, name: str) -> str:
    text = file.read_text()
    node: ast.AST = ast.parse(text)
    for part in name.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef)
        node = next(each for each in ast.iter_child_nodes(node) if isinstance(each, kinds) and each.name == part)
    assert isinstance(node, ast.ClassDef | ast.FunctionDef)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


def places() -> list[tuple[str, str]]:
    """(place, text) of each in the page."""
    return [(match[1], match[2]) for match in PLACE.finditer(PAGE.read_text())]


def write() -> None:
    """Write the code into the page."""
    PAGE.write_text(
        PLACE.sub(lambda match: f"<!-- file: {match[1]} -->\n{block(match[1])}<!-- end -->\n", PAGE.read_text())
    )


if __name__ == "__main__":
    write()
