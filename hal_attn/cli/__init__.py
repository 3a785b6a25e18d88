"""The command line `hal-attn`: one module a verb, each with a function of its own name."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Annotated

import typer

from hal_attn.errors import ConfigurationError, HalAttnError, InvalidAttentionInputError

VERBS = {
    "doctor": "What is here: usable, or why not and what to do.",
    "env": "Every environment variable and its value now.",
    "explain": "Which backend a call would take, and why.",
    "verify": "Whether each backend is right, as a report.",
    "tuning": "The measured choices that are kept, and how to drop them.",
    "demo": "A real model on real text, packed.",
}


def main() -> None:
    """Run `hal-attn`.

    Exit status: 0 all is well; 1 it is not, or nothing here can run the call; 2 wrong input or a wrong setting.
    """
    make_app()(prog_name="hal-attn")


def make_app() -> typer.Typer:
    """The command with its verbs. They are imported here, not above, so that importing the package stays light."""
    app = typer.Typer(
        help="Attention written once, run on NVIDIA, AMD and Huawei Ascend accelerators and on the CPU.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for verb, summary in VERBS.items():
        run = getattr(import_module(f"hal_attn.cli.{verb}"), verb)
        app.command(verb, short_help=summary)(_readable(run))
    app.add_typer(import_module("hal_attn.cli.bench").make_bench(_readable), name="bench")
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        from hal_attn import __version__

        typer.echo(f"hal-attn {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _readable(verb: Callable[..., None]) -> Callable[..., None]:
    """`verb`, with the errors that `hal_attn` raises on purpose as a message on stderr instead of a traceback."""

    @wraps(verb)
    def run(*args: object, **kwargs: object) -> None:
        try:
            verb(*args, **kwargs)
        except HalAttnError as error:
            typer.echo(f"hal-attn: {error}", err=True)
            wrong = isinstance(error, (InvalidAttentionInputError, ConfigurationError))
            raise typer.Exit(2 if wrong else 1) from None

    return run
