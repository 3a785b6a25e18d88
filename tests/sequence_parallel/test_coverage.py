"""The tests that the table and the list of features name exist."""

import subprocess
import sys
from pathlib import Path

from tests.sequence_parallel.coverage import FEATURES, TABLE

FOLDER = Path(__file__).parent


def test_every_named_test_exists():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "cuda or not cuda", str(FOLDER)]
    done = subprocess.run(command, cwd=FOLDER.parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    here = {line.removeprefix("tests/sequence_parallel/") for line in done.stdout.splitlines()}
    named = {name for names in (*TABLE.values(), *FEATURES.values()) for name in names}
    missing = [name for name in named if not any(test.startswith(name) for test in here)]
    assert not missing, missing
    assert len(TABLE) == 40
    assert len(FEATURES) == 11
