"""`python ci PLATFORM` is what `ci/run PLATFORM` starts."""

from runner.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
