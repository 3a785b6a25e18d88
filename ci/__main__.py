"""`python ci PLATFORM` is what `ci/run PLATFORM` starts."""

import sys


def run() -> int:
    """Start it; an interpreter too old to read its modules is named before any of them is imported."""
    # Written so that any Python 3 reads it.
    if sys.version_info < (3, 10):  # noqa: UP036
        sys.stderr.write(
            "ci/run: %s is Python %d.%d.%d; it needs 3.11 or newer, or 3.10 with --no-install. "  # noqa: UP031
            "Name one: PYTHON=/path/to/python3.11 ci/run ... (--python names that of the steps alone)\n"
            % (sys.executable, *sys.version_info[:3])
        )
        return 2
    from runner.cli import main

    return main()


if __name__ == "__main__":
    raise SystemExit(run())
