"""What a user reads of a job under horovodrun."""

import socket
import sys

import pytest

PROGRAM = """
import os, sys
rank = os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
os.write(1, b"rank " + rank.encode() + b" \\xe9\\xff\\n")
os.write(2, b"error of rank " + rank.encode() + b"\\n")
"""


# One launch for each controller: each forwards the output by code of its own.
@pytest.mark.parametrize(("launcher", "tag"), [("gloo", b"[1]"), ("mpi", b"[1,1]")])
def test_only_rank_0_has_no_prefix(run, launcher, tag):
    program = ["--no-prefix-rank-0", sys.executable, "-c", PROGRAM]
    job = run([], launcher=launcher, program=program)
    assert job.returncode == 0, job.text
    assert sorted(job.output.read_bytes().splitlines()) == [
        tag + b"<stderr>:error of rank 1",
        tag + b"<stdout>:rank 1 \xe9\xff",
        b"error of rank 0",
        b"rank 0 \xe9\xff",
    ]


SCRIPT = """
import sys
import hvdtrain.keras as hvd
hvd.init()
for i in range(200):
    print(hvd.rank(), "number", i)
    print(hvd.rank(), "number", i, file=sys.stderr)
"""


def test_ranks_of_a_job_that_a_test_waits_for_are_forks(run):
    program = [sys.executable, "-c", "import sys; print('keras' in sys.modules)"]
    assert sorted(run([], launcher="gloo", program=program).lines) == ["True", "True"]
    # Also where the fork is killed: the program does not run again.
    killed = "import os; print(1, flush=True); os.kill(os.getpid(), 9)"
    job = run([], program=[sys.executable, "-c", killed])
    assert (job.lines, job.returncode) == (["1"], -9)


# mpirun is what cuts lines, and only where several ranks print.
@pytest.mark.long
def test_the_lines_of_a_script_are_whole(run):
    program = ["--tag-output", sys.executable, "-c", SCRIPT]
    unbuffered = {"PYTHONUNBUFFERED": "1"}
    job = run(
        [], launcher="mpirun", program=program, environment=unbuffered, forked=False
    )
    assert job.returncode == 0, job.text
    # Nothing else: no message of TensorFlow.
    assert sorted(job.text.splitlines()) == sorted(
        f"[1,{rank}]<{stream}>:{rank} number {i}"
        for rank in (0, 1)
        for stream in ("stdout", "stderr")
        for i in range(200)
    )


@pytest.mark.release
def test_ranks_of_hvdtrain_run_print_no_messages_of_tensorflow(run, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import tensorflow as tf\nprint(tf.constant(1).numpy())\n")
    job = run([], launcher="run", program=[sys.executable, str(script)])
    assert job.returncode == 0, job.text
    assert sorted(job.text.splitlines()) == ["[0]<stdout>:1", "[1]<stdout>:1"]


# mpirun's messages of a real failure, which change with its version.
def test_a_failure_under_mpi_ends_with_one_line(run):
    body = 'import os, sys; sys.exit(3 * (os.environ["OMPI_COMM_WORLD_RANK"] == "1"))'
    job = run([], launcher="mpi", program=[sys.executable, "-c", body])
    host = socket.gethostname()
    line = f"horovodrun: the first rank that failed is rank 1 on {host}: exit code 3.\n"
    assert (job.returncode, job.text) == (3, line)
