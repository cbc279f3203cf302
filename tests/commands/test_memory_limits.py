"""A model that is too large for the memory of one rank trains on two, fully sharded.

Each rank is in a control group of its own, whose memory is limited. The kernel ends a
rank that exceeds it.
"""

import os
import pathlib
import sys
import uuid

import pytest

PROGRAM = pathlib.Path(__file__).with_name("large_program.py")
# Of replicated weights a rank takes 1.6 GB, of two sharded ones 1.1 GB; of both, 0.4 GB
# are TensorFlow's.
LIMIT_BYTES = 1_350_000_000
ENTER = """
echo $$ >"$1$OMPI_COMM_WORLD_RANK/cgroup.procs"
shift
exec "$@"
"""

pytestmark = pytest.mark.release


@pytest.fixture
def groups():
    """The prefix of the directories of two groups: add the number of a rank."""
    root = pathlib.Path("/sys/fs/cgroup")
    # Version 1, or 2.
    parent, limit = root / "memory", "memory.limit_in_bytes"
    if not (parent / limit).exists():
        parent, limit = root, "memory.max"
    prefix = parent / f"hvdtrain_{uuid.uuid4().hex}_"
    made = [pathlib.Path(f"{prefix}{rank}") for rank in range(2)]
    try:
        for directory in made:
            directory.mkdir()
            (directory / limit).write_text(str(LIMIT_BYTES))
    except OSError as error:
        for directory in filter(pathlib.Path.exists, made):
            directory.rmdir()
        pytest.skip(f"no group with a limit of memory can be made: {error}")
    yield prefix
    for directory in made:
        os.rmdir(directory)


def test_a_model_that_exceeds_the_memory_of_one_rank_trains_on_two(start, groups):
    program = ["sh", "-c", ENTER, "sh", str(groups), sys.executable, str(PROGRAM)]
    alone = start(["replicated"], launcher="mpirun", ranks=1, program=program).wait()
    assert alone.returncode
    assert "trained" not in alone.text
    # Signal 9: the kernel's.
    assert "signal 9" in alone.text
    two = start(["sharded"], launcher="mpirun", ranks=2, program=program).wait()
    assert two.returncode == 0, two.text
    assert two.text.count("trained") == 2
