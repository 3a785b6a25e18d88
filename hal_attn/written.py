"""What wrote a JSON file, by what it holds: so that an error about a file of another kind can say which it is."""

from __future__ import annotations

CONFORMANCE = "reports of `hal-attn verify`"
BENCH = "times of `hal-attn bench`"
# The fields that tell a kind; the first that has all of them is it.
_FIELDS = (
    ("the steps of a run of ci/run", ("steps", "simulation")),
    ("the environment of a run of ci/run", ("why_not_pinned", "installed")),
    (CONFORMANCE, ("machines", "conflicts")),
    (CONFORMANCE, ("effort", "platforms", "backends")),
    (BENCH, ("measure", "rows")),
    ("an answer of `hal-attn doctor`", ("problems", "platforms", "backends")),
    ("an answer of `hal-attn explain`", ("request", "considered")),
    ("an answer of `hal-attn env`", ("variables", "unknown")),
)


def kind_of(content: object) -> str:
    """What a file with this content is, as "the steps of a run of ci/run"."""
    if not isinstance(content, dict):
        return f"JSON that is a {type(content).__name__}"
    found = (kind for kind, fields in _FIELDS if all(field in content for field in fields))
    return next(found, "JSON of no kind known here")
