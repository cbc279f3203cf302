"""The stages of .ci/run end with their processes, and their seconds come last."""

import os
import pathlib
import subprocess
import uuid

import psutil
import pytest

STAGES = pathlib.Path(__file__).parents[2] / ".ci/stages.sh"
# A daemon in a session of its own, which keeps the stage's output open.
DAEMON = """(trap '' TERM; exec setsid sleep 1000 {mark}) & echo started; {then}"""


def run(script):
    """Run the stages of `script`; return the exit code and the lines of the output."""
    script = (
        f"set -uo pipefail\nlast_end=100\nsource {STAGES}\ngrace=1\n{script}\nreport"
    )
    job = subprocess.run(
        ["bash", "-c", script], stdout=subprocess.PIPE, text=True, timeout=60
    )
    return job.returncode, job.stdout.splitlines()


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")
@pytest.mark.parametrize(
    ("limit", "then", "result", "code"),
    [(30, "true", "passed", 0), (3, "sleep 1000", "timed out after 3 s", 1)],
)
def test_a_stage_ends_with_a_daemon_that_ignores_signals(
    tmp_path, limit, then, result, code
):
    # `sleep` adds up its arguments.
    mark = str(uuid.uuid4().int % 10**9)
    stage = tmp_path / "stage"
    stage.write_text(DAEMON.format(mark=mark, then=then))
    returncode, lines = run(f"run {limit} bash {stage}")
    assert returncode == code
    assert "started" in lines
    assert lines[-2].endswith(f"bash {stage} {result}")
    alive = psutil.process_iter(["cmdline"])
    assert not [each for each in alive if mark in (each.info["cmdline"] or ())]


def test_a_stage_cleans_up_at_its_limit(tmp_path):
    stage = tmp_path / "stage"
    stage.write_text("trap 'echo cleaned' EXIT\nsleep 1000")
    returncode, lines = run(f"run 3 bash {stage}")
    assert returncode == 1
    assert "cleaned" in lines


def test_the_seconds_of_all_stages_come_last():
    returncode, lines = run("run 30 sh -c 'echo no; exit 3'\nrun 30 true\nrun 200 true")
    assert returncode == 1
    assert "ci: FAILED: sh -c echo no; exit 3" in lines
    # "ci: 12 s 97 % COMMAND RESULT"
    stages = [line.split(maxsplit=5) for line in lines[-4:]]
    assert stages[0][5] == "sh -c echo no; exit 3 FAILED (exit code 3)"
    assert stages[1][5] == "true passed"
    assert "true LEFT OUT after" in lines[-2]
    assert stages[3][5] == "in all"
    assert 0 <= int(stages[3][3]) <= 100


def test_stages_of_lanes_run_at_the_same_time(tmp_path):
    # Each waits for the other.
    stage = tmp_path / "stage"
    stage.write_text(f"touch {tmp_path}/$1; until [ -e {tmp_path}/$2 ]; do :; done; $3")
    returncode, lines = run(f"""
run 30 true
a() {{ run 30 bash {stage} one two 'exit 3'; }}
b() {{ run 30 bash {stage} two one; run 30 echo b; }}
beside a b
run 30 true""")
    assert returncode == 1
    assert [line.split(maxsplit=5)[5] for line in lines[-6:]] == [
        "true passed",
        f"bash {stage} one two exit 3 FAILED (exit code 3)",
        f"bash {stage} two one passed",
        "echo b passed",
        "true passed",
        "in all",
    ]
    assert f"ci: FAILED: bash {stage} one two exit 3" in lines
    assert "b" in lines


def test_ctrl_c_ends_a_program_of_a_lane():
    returncode, lines = run("lane() { run 30 sh -c 'kill -INT $$'; }\nbeside lane")
    assert returncode == 1
    assert "FAILED (exit code 130)" in lines[-2]
