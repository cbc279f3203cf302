"""The native collectives under the sanitizers of the compiler."""

import pathlib
import shutil
import subprocess

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "sanitize.sh"


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
@pytest.mark.parametrize("kind", ["thread", "address"])
def test_collectives_have_no_races_and_stay_within_their_memory(kind):
    command = [SCRIPT, kind]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all results are right") == 3
