"""The benchmark: its figures by hand-computed numbers, its rounds, its files."""

import dataclasses
import math
import os
import pathlib
import re
import subprocess
import sys

import pytest

from hvdtrain import processes
from hvdtrain.benchmark import figures, records, tables, variants
from hvdtrain.benchmark.benchmark_options import BenchmarkOptions, is_workload
from hvdtrain.job import JobError, World
from hvdtrain.job.world import SharedJobError

ROOT = pathlib.Path(__file__).parents[2]


def options(**changes):
    return BenchmarkOptions(**changes).with_defaults()


class TestFigures:
    @pytest.mark.parametrize(
        ("percent", "value"), [(1, 10), (50, 30), (61, 40), (90, 50), (99, 50)]
    )
    def test_percentiles_are_measured_values(self, percent, value):
        assert figures.percentile([50, 10, 40, 20, 30], percent) == value

    def test_step_times_are_those_of_executions_divided_by_their_steps(self):
        times = figures.StepTimes.from_executions(
            [1.0, 2.0, 6.0], steps_per_execution=2
        )
        assert times == figures.StepTimes(
            mean=1.5, p50=1.0, p90=3.0, p99=3.0, executions=3
        )

    def test_the_parts_of_a_round_add_up(self):
        parts = figures.split(train=10.0, constant=8.0, function=7.0, local=4.0)
        assert parts == figures.Split(
            compute=4.0, communication=3.0, overhead=1.0, input_wait=2.0, step=10.0
        )

    def test_variants_that_do_not_exist_leave_their_part_zero(self):
        parts = figures.split(train=10.0, constant=None, function=7.0, local=None)
        assert parts == figures.Split(
            compute=7.0, communication=0.0, overhead=3.0, input_wait=0.0, step=10.0
        )

    def test_a_slow_phase_of_the_machine_cancels(self):
        # In the second round everything takes twice as long.
        times = [
            figures.split(train=f * 10, constant=f * 9, function=f * 7, local=f * 4)
            for f in (1, 2, 1)
        ]
        assert figures.median_split(times) == times[0]
        assert figures.median_ratio([10, 20, 10], [5, 10, 5]) == 2


class TestSummary:
    @pytest.fixture
    def two_ranks(self):
        # Two rounds; executions of 10 steps with 8 samples.
        chief = {
            "train": [[10.0, 10.0], [10.0]],
            "constant": [[8.0], [8.0]],
            "function": [[7.0], [7.0]],
            "local": [[4.0], [4.0]],
            "alone": [[5.0], [5.0]],
            "bare": [[4.0], [4.0]],
        }
        other = {**chief, "local": [[2.0], [2.0]], "alone": [[], []], "bare": [[], []]}
        return [chief, other]

    def test_of_two_ranks(self, two_ranks):
        found = figures.summarize(
            two_ranks, options(batch_size=8, steps_per_execution=10), 2
        )
        assert found["samples_per_second_by_rank"] == [8.0, 8.0]
        assert found["samples_per_second"] == 16.0
        assert found["step_seconds"]["executions"] == 3
        # The median over rounds and ranks: compute of 0.4 and 0.2.
        assert found["split_seconds"] == pytest.approx(
            {
                "compute": 0.3,
                "communication": 0.4,
                "overhead": 0.1,
                "input_wait": 0.2,
                "step": 1.0,
            }
        )
        assert found["load_balance"] == pytest.approx(0.75)
        assert found["one_rank"] == pytest.approx(
            {
                "samples_per_second": 16.0,
                "bare_samples_per_second": 20.0,
                "speedup": 1.0,
                "efficiency": 0.5,
                "against_bare": 0.8,
                "all_ranks_against_bare": 0.8,
            }
        )

    def test_of_two_devices_in_one_process(self, two_ranks):
        changes = {"strategy": "split", "batch_size": 8, "steps_per_execution": 10}
        found = figures.summarize(two_ranks[:1], options(**changes), 2)
        assert found["samples_per_second_by_rank"] == [16.0]
        # The first device is busy for 0.7, the other for 0.4.
        assert found["load_balance"] == pytest.approx(1.1 / 1.4)

    def test_of_one_rank(self):
        ranks = [{"train": [[2.0]], "function": [[1.0]], "bare": [[1.0]]}]
        found = figures.summarize(ranks, options(batch_size=8), 1)
        assert found["one_rank"]["speedup"] == 1.0
        assert found["one_rank"]["against_bare"] == 0.5
        assert found["load_balance"] == 1.0


class TestRounds:
    def test_the_order_is_reversed_in_every_other_round(self):
        calls = []

        def variant(name):
            def run(executions):
                calls.append((name, executions))
                return [0.5] * executions

            return variants.Variant(run=run, is_alone=name == "b")

        by_name = {name: variant(name) for name in "ab"}
        speeds = variants.warm_up(World(), by_name)
        assert speeds == {"a": 2.0, "b": 2.0}
        calls.clear()
        found = variants.run_rounds(World(), by_name, speeds, rounds=3, seconds=4.0)
        assert calls == [(name, 8) for name in "abbaab"]
        assert found == {name: [[0.5] * 8] * 3 for name in "ab"}

    def test_the_timer_leaves_the_first_execution_out(self):
        clock = iter([5.0, 6.0, 8.0])
        timer = variants.ExecutionTimer(clock=lambda: next(clock))
        for batch in range(3):
            timer.on_train_batch_end(batch)
        assert timer.seconds == [1.0, 2.0]

    def test_a_line_every_so_many_steps(self, capsys):
        lines = variants.StepLines(every_steps=25, steps_per_execution=10)
        for batch in range(6):
            lines.on_train_batch_end(batch, {"accuracy": 0.25, "loss": 0.5})
        assert capsys.readouterr().out.splitlines() == [
            "step 30  loss 0.5000  accuracy 0.2500",
            "step 50  loss 0.5000  accuracy 0.2500",
        ]


class TestStartUp:
    @pytest.mark.parametrize(
        ("names", "seconds"),
        [
            (["bash", "init"], 10.0),
            (["mpirun", "bash", "init"], 20.0),
            # The outermost launcher, with others in between.
            (["mpirun", "sh", "horovodrun", "bash"], 40.0),
            # The job's own step has begun long before.
            (["mpirun", "bash", "slurmstepd"], 20.0),
            (["slurmstepd", "slurmd"], 20.0),
        ],
    )
    def test_the_command_is_the_outermost_launcher(self, monkeypatch, names, seconds):
        # Each ancestor started 10 s before its child, this process 10 s ago.
        table = [
            processes.ProcessStat(name, "S", number + 1, 1, -10.0 * number, 0)
            for number, name in enumerate(["python", *names], start=1)
        ]
        table[-1] = table[-1]._replace(parent=1)
        monkeypatch.setattr(processes, "read_stat", lambda pid: table[pid - 1])
        monkeypatch.setattr(processes.os, "getpid", lambda: 1)
        monkeypatch.setattr(processes.os, "getppid", lambda: 2)
        monkeypatch.setattr(variants.time, "clock_gettime", lambda clock: 0.0)
        assert variants.seconds_since_command() == seconds

    def test_the_memory_of_this_process(self):
        memory = variants.memory()
        assert memory["peak_resident"] > 100e6  # TensorFlow is loaded
        assert memory["proportional"] <= memory["peak_resident"]


class TestOptions:
    def test_defaults_of_the_workload(self):
        chosen = options(workload="resnet18")
        assert (chosen.batch_size, chosen.steps_per_execution) == (16, 1)
        assert options(batch_size=7).batch_size == 7
        assert options(strategy="mirrored").steps_per_execution == 1
        assert options().steps_per_execution == 20

    @pytest.mark.parametrize(
        ("text", "is_one"),
        [
            ("mlp", True),
            ("package.module:make_model", True),
            ("vgg", False),
            ("module:", False),
            ("module:function()", False),
        ],
    )
    def test_workloads(self, text, is_one):
        assert is_workload(text) is is_one

    @pytest.mark.parametrize(
        ("argument", "words"),
        [
            ("--workload=vgg", ["--workload=vgg", "resnet18", "module:function"]),
            ("--strategy=pipeline", ["--strategy=pipeline", "mirrored"]),
            ("--seconds=-1", ["--seconds=-1", "[0, 120]"]),
            ("--seconds=nan", ["expected a number", "--seconds"]),
            ("--compare=", ["--compare", "expected files"]),
            ("--compare=a.json,", ["--compare", "expected files"]),
            ("--json=", ["--json", "expected a path"]),
        ],
    )
    def test_wrong_flags_are_one_line(self, argument, words):
        command = [sys.executable, "-m", "hvdtrain.benchmark", *argument.split()]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert all(word in done.stderr for word in words), done.stderr


def result():
    """A result of one rank with hand-made times."""
    ranks = [{"train": [[0.2]], "function": [[0.1]], "bare": [[0.1]]}]
    return {
        "format": tables.FORMAT,
        "machine": "a machine",
        "load_average": 0.5,
        "versions": {"hvdtrain": "0"},
        "hosts": ["host1"],
        "threads": [2],
        "size": 1,
        "controller": "MPI",
        "path": "no reduction",
        "flags": dataclasses.asdict(options(rounds=1)),
        "figures": {
            **figures.summarize(ranks, options(), 1),
            "data": "digits",
            "warning": "",
            "reduced_bytes": 0,
            "memory": [{"peak_resident": 3_000_000_000, "proportional": 2_000_000}],
            "start_up": {"command": "python", "seconds": 4.25},
        },
    }


class TestFiles:
    def test_what_is_written_is_read(self, tmp_path):
        path = str(tmp_path / "result.json")
        written = result()
        records.write_json(path, written)
        assert records.read_json([path]) == {path: written}

    def test_not_a_number_is_not_written(self, tmp_path):
        with pytest.raises(ValueError, match="Out of range"):
            records.write_json(tmp_path / "result.json", {"seconds": math.nan})
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        "text",
        [
            "[1]",
            "7",
            "nothing",
            '{"format": 0}',
            f'{{"format": {tables.FORMAT}, "figures": []}}',
        ],
    )
    def test_a_file_of_others_is_not_compared(self, tmp_path, text):
        path = tmp_path / "other.json"
        path.write_text(text)
        with pytest.raises(JobError, match=f"{path}.*expected a file that --json"):
            tables.comparison(records.read_json([str(path)]))

    def test_a_pipe_is_not_compared(self, tmp_path):
        path = tmp_path / "pipe"
        os.mkfifo(path)
        with pytest.raises(JobError, match=f"{path}: Not a regular file"):
            records.read_json([str(path)])


class TestTables:
    def test_of_a_training(self):
        text = " ".join(tables.training(result()).split())
        # 64 samples in 0.2 s / 20 steps.
        assert "speed 6,400 samples/s" in text
        assert "compute 5.000 ms 50.0%" in text
        assert "bare Keras 12,800 samples/s; one rank has 0.50 of it" in text
        assert "4.2 s from python" in text
        assert "peak of a rank 3 GB; PSS of all ranks 2 MB" in text
        # Neither a variant without reduction nor one with a constant batch.
        assert "communication - - not hidden" in text
        assert "input wait - - for the input" in text

    @pytest.mark.parametrize(
        ("parts", "shares"),
        [
            # Medians over rounds that add up to 102.5 and to 97.4 % of their step.
            ((0.60, 0.225, 0.1, 0.1), ["58.5%", "22.0%", "9.7%", "9.8%"]),
            ((0.512, 0.238, 0.049, 0.175), ["52.6%", "24.4%", "5.0%", "18.0%"]),
            ((0.7, 0.7, 0.7, 0.0), ["33.3%", "33.4%", "33.3%", "0.0%"]),
        ],
    )
    def test_shares_of_a_step_add_up(self, parts, shares):
        found = result()
        names = ("compute", "communication", "overhead", "input_wait")
        found["figures"]["split_seconds"] = dict(zip(names, parts, strict=True))
        found["figures"]["split_seconds"]["step"] = 1.0
        variants = dict.fromkeys(("train", "constant", "function", "local"))
        found["figures"]["rounds"]["step_seconds_by_rank"] = [variants]
        printed = re.findall(r"ms +([\d.]+%)", tables.training(found))
        assert printed == shares
        assert round(sum(float(share[:-1]) for share in shares), 1) == 100

    def test_doubts(self):
        found = result()
        found["load_average"] = 2.5
        found["figures"]["split_seconds"]["overhead"] = -1e-6
        text = tables.training(found)
        assert "load average before was 2.5, and the ranks have 2 threads" in text
        assert "fewer than 3 rounds" in text
        assert "a part of the step is negative" in text

    def test_of_several_results(self):
        text = tables.comparison({"a": result(), "b": result()})
        (row,) = [line for line in text.splitlines() if line.startswith("samples/s")]
        assert row.split()[1:] == ["6,400", "6,400"]


def test_a_function_compiles_its_model_itself():
    with pytest.raises(SharedJobError, match="passes jit_compile=True"):
        options(workload="module:make", jit_compile=True).check(1)
    options(workload="cnn", jit_compile=True).check(2)
