"""`hvdtrain.run` on this machine, and on real engines: Ray and Spark.

Spark's `local-cluster` has executors in processes of their own. `scripts/slurm_test.sh`
runs the same program on Slurm.
"""

import os
import pathlib
import pickle
import re
import shutil
import signal
import sys

import numpy as np
import psutil
import pytest

import hvdtrain

ROOT = pathlib.Path(__file__).parents[2]
HERE = ROOT / "tests" / "commands"
PROGRAM = [sys.executable, str(HERE / "running_program.py")]
# Of this process, which has found the engine's package.
ENGINE_PATH = os.pathsep.join(filter(None, sys.path))
# Without matplotlib.
LOCAL_PATH = os.pathsep.join([str(HERE / "without"), ENGINE_PATH])
SPARK = pytest.mark.skipif(not shutil.which("java"), reason="Spark needs Java")
EXECUTORS = "local-cluster[2,1,1024]"
IN_RELEASE = [pytest.mark.engines, pytest.mark.release]
RAY = pytest.param("ray", marks=pytest.mark.engines)
RAY_IN_RELEASE = pytest.param("ray", marks=IN_RELEASE)
SPARK_IN_RELEASE = pytest.param(EXECUTORS, marks=[*IN_RELEASE, SPARK])
SPARK_OF_ONE_PROCESS = pytest.param("local[2]", marks=[*IN_RELEASE, SPARK])
# The agents of Spark are the same in one process, and end as on Ray.
ENDING_ENGINES = ["local", RAY, SPARK_IN_RELEASE]
ENGINES = [
    "local",
    RAY,
    pytest.param(EXECUTORS, marks=[pytest.mark.engines, SPARK]),
    SPARK_OF_ONE_PROCESS,
]
# The error of a killed rank, and test_preemption.py, cover most of these.
LONG_ENGINES = [pytest.param("local", marks=pytest.mark.long), *ENDING_ENGINES[1:]]
RELEASE_ENGINES = [
    pytest.param("local", marks=pytest.mark.release),
    *ENDING_ENGINES[1:],
]
CAUSE = "KeyError('no such column')"


@pytest.fixture
def case(start, tmp_path):
    """Return `case(engine, name)`: starts the program."""

    def case(engine, name, options="{}", **environment):
        arguments = [engine, name, str(tmp_path), options]
        path = LOCAL_PATH if engine == "local" else ENGINE_PATH
        environment["PYTHONPATH"] = path
        # Ray would write a token to the home directory.
        environment["RAY_AUTH_MODE"] = "disabled"
        return start(arguments, program=PROGRAM, environment=environment)

    return case


def results_of(job):
    assert job.returncode == 0, job.text
    [line] = [line for line in job.lines if line.startswith("results ")]
    return line.removeprefix("results ")


def weights_in(folder):
    with np.load(folder / "weights.npz") as file:
        return list(file.values())


@pytest.fixture(scope="module")
def weights():
    """Return the weights of `expected`, which are computed once."""
    return []


@pytest.fixture
def expected(run, tmp_path, weights):
    """Return the weights that horovodrun computes."""
    if not weights:
        folder = tmp_path / "horovodrun"
        folder.mkdir()
        job = run(
            ["horovodrun", "digits", str(folder)], program=PROGRAM, launcher="gloo"
        )
        assert job.returncode == 0, job.text
        weights += weights_in(folder)
    return weights


def assert_equal_weights(folder, expected):
    for found, weight in zip(weights_in(folder), expected, strict=True):
        np.testing.assert_array_equal(found, weight)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_training_is_that_of_horovodrun(case, expected, tmp_path, engine):
    # Ray sets it on its workers.
    job = case(engine, "digits", TF_USE_LEGACY_KERAS="1").wait()
    assert results_of(job) == "[(0, 0, 47), (1, 0, 47)]"
    assert "TF_USE_LEGACY_KERAS is removed" in job.text
    assert not re.search(r"^\[\d\]<std...>:$", job.text, re.M), job.text
    assert_equal_weights(tmp_path, expected)


def example():
    page = (ROOT / "docs" / "python.md").read_text()
    return re.search(r"```python\n(.*?)```", page, re.S)[1]


# The test above calls a function of the same kind.
@pytest.mark.long
def test_the_example(run, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(example())
    job = run([], program=[sys.executable, str(script)])
    assert job.lines[-1] == "[47, 47]", job.text


@pytest.mark.engines
def test_the_example_in_a_notebook(monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    monkeypatch.setenv("PYTHONPATH", paths)
    cells = [nbformat.v4.new_code_cell(text) for text in example().split("if __name__")]
    cells[1]["source"] = "print(hvdtrain.run(train, args=[0.002], np=2))"
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
    text = "".join(output.get("text", "") for output in notebook.cells[1].outputs)
    assert text.splitlines()[-1] == "[47, 47]"
    assert "[0]<stdout>:step 47/47" in text


@pytest.mark.parametrize("engine", ENDING_ENGINES)
def test_an_exception_of_a_rank_is_raised_in_the_caller(case, engine):
    job = case(engine, "raised", PYTHONIOENCODING="ascii").wait()
    assert job.returncode == 0, job.text
    assert "a caller whose stdout is ASCII: ?" in job.lines
    assert f"caught 1 {CAUSE}" in job.lines


def test_an_error_of_a_rank_can_be_pickled():
    # As one that is raised in a process of an executor.
    error = pickle.loads(pickle.dumps(hvdtrain.LostRankError("text", rank=3)))
    assert (str(error), error.rank) == ("text", 3)


KILLED = "rank 1 on .* was killed by SIGKILL"
ENDED = "rank [01] on .* was lost: its agent has ended"


@pytest.mark.parametrize("engine", LONG_ENGINES)
def test_a_job_continues_after_a_rank_was_killed(case, expected, tmp_path, engine):
    check_a_kill(case, expected, tmp_path, engine, "rank", KILLED)


@pytest.mark.parametrize("engine", [RELEASE_ENGINES[0], RAY_IN_RELEASE])
def test_a_job_continues_after_an_agent_was_killed(case, expected, tmp_path, engine):
    check_a_kill(case, expected, tmp_path, engine, "agent", ENDED)


@pytest.mark.engines
@SPARK
def test_a_job_continues_after_an_executor_was_killed(case, expected, tmp_path):
    check_a_kill(case, expected, tmp_path, EXECUTORS, "executor", ENDED)


@pytest.mark.engines
def test_a_job_continues_on_fewer_ranks_after_a_node_was_lost(case, expected, tmp_path):
    job = case("ray-nodes", "killed_node", '{"min_workers": 1}').wait()
    assert results_of(job) == "[(0, 15, 47)]"
    assert re.search(rf"^hvdtrain.run: {ENDED}\. .*restart 1 of 1", job.text, re.M)
    # One rank has the batches of both: sums have another order.
    for found, weight in zip(weights_in(tmp_path), expected, strict=True):
        np.testing.assert_allclose(found, weight, rtol=1e-4, atol=1e-6)


def check_a_kill(case, expected, tmp_path, engine, killed, error):
    # Ray may place fewer, and has to place all.
    options = '{"min_workers": 1}' if engine == "ray" else "{}"
    job = case(engine, f"killed_{killed}", options).wait()
    # The last checkpoint before the kill.
    assert results_of(job) == "[(0, 15, 47), (1, 15, 47)]"
    assert re.search(rf"^hvdtrain.run: {error}\. .*restart 1 of 1", job.text, re.M)
    assert_equal_weights(tmp_path, expected)


@pytest.mark.parametrize("engine", RELEASE_ENGINES)
def test_a_rank_that_was_killed_is_an_error(case, engine):
    job = case(engine, "lost").wait()
    assert job.returncode != 0
    assert re.search(r"LostRankError: rank 1 on .* was killed by SIGKILL", job.text)


@pytest.mark.long
@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        pytest.param(
            "hangs",
            r"did not call a collective that other ranks waited in\.\n\n"
            r"rank 1 on .* did not enter allreduce .* It is in running_program.py:\d+ ",
            marks=pytest.mark.release,
        ),
        ("returns", "has returned, and other ranks waited for it in a collective"),
    ],
)
def test_an_error_names_the_rank_that_others_waited_for(case, ending, reason):
    job = case(
        "local",
        ending,
        HOROVOD_STALL_CHECK_TIME_SECONDS="3",
        HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="10",
    ).wait()
    assert job.returncode == 0, job.text
    error = rf"^caught 1 rank 0 on [^\0]*Error: [^\0]*\n\nrank 1 on .* {reason}"
    assert re.search(error, job.text, re.M), job.text


@pytest.mark.parametrize("engine", ENDING_ENGINES)
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.release), signal.SIGKILL]
)
def test_the_end_of_the_caller_ends_the_ranks(case, tmp_path, engine, number):
    job = case(engine, "waits")
    # Rank 0 waits in native code.
    files = [tmp_path / f"rank-{rank}" for rank in range(2)]
    job.wait_until(lambda: all(file.exists() for file in files), "a rank")
    program = "hvdtrain.runner.rank"
    ranks = [process for process in job.processes() if program in process.cmdline()]
    assert len(ranks) == 2
    job.process.send_signal(number)
    assert job.process.wait(60) != 0
    _, alive = psutil.wait_procs(ranks, timeout=30)
    assert not alive
    # Ray's own processes end later.
    if engine == "local":
        job.wait()


@pytest.mark.parametrize("engine", RELEASE_ENGINES)
def test_many_runs_of_one_caller_leave_nothing_behind(case, engine):
    job = case(engine, "often").wait()
    assert results_of(job) == "[(0, 2), (1, 2)] [(0, 2), (18, 2)]"
    found = re.search(r"processes: (\(.*\)) (\(.*\))$", job.text, re.M)
    assert found[1] == found[2]


@pytest.mark.engines
@pytest.mark.parametrize(
    ("engine", "advice"),
    [
        ("ray", "cluster has {'CPU'"),
        pytest.param("local[2]", "free core", marks=[pytest.mark.release, SPARK]),
    ],
)
def test_an_engine_without_room_is_one_line(case, engine, advice):
    job = case(engine, "full").wait()
    assert job.returncode != 0
    assert re.search(
        rf"RunError: Received 0 of 3 ranks from \w+: .* within 5 s\. .*{advice}",
        job.text,
    )


@pytest.mark.long
def test_the_ranks_of_a_caller_that_is_bound_share_its_cores(run, tmp_path):
    arguments = ["local", "launcher", str(tmp_path)]
    # mpirun has more cores than the caller that it binds.
    job = run(arguments, program=PROGRAM, launcher="mpirun", ranks=1)
    assert results_of(job) == "['hvdtrain-agent', 'hvdtrain-agent']"


@pytest.mark.long
def test_programs_of_a_rank_have_the_search_path_of_the_caller(case):
    # Not its whole `sys.path`, with which the rank itself finds modules.
    job = case("local", "path").wait()
    assert results_of(job) == str([LOCAL_PATH] * 2)


@pytest.mark.engines
def test_ray_places_as_many_ranks_as_fit(case):
    job = case("ray", "full", '{"min_workers": 1}').wait()
    assert results_of(job) == "[(0, 2), (1, 2)]"


@pytest.mark.engines
@pytest.mark.parametrize("number", [0, 4])
def test_min_workers_out_of_range(number):
    pytest.importorskip("ray")
    error = rf"Received min_workers={number} with np=3; expected between 1 and 3\."
    with pytest.raises(ValueError, match=error):
        hvdtrain.run(print, np=3, on=hvdtrain.Ray(min_workers=number))
