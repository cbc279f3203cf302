"""The native collectives under the sanitizers of the compiler."""

import os
import pathlib
import shutil
import subprocess

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "sanitize.sh"


def can_link(kind):
    """Whether there is a compiler with the library of a sanitizer."""
    command = ["c++", f"-fsanitize={kind}", "-x", "c++", "-", "-o", os.devnull]
    return (
        shutil.which("c++")
        and not subprocess.run(
            command,
            input=b"int main() {}",
            capture_output=True,
            timeout=60,
            check=False,
        ).returncode
    )


@pytest.mark.release
@pytest.mark.parametrize("kind", ["thread", "address"])
def test_collectives_have_no_races_and_stay_within_their_memory(kind):
    if not can_link(kind):
        pytest.skip(f"needs a C++ compiler with -fsanitize={kind}")
    command = [SCRIPT, kind]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=480, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all results are right") == 7
