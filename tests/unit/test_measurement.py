"""The benchmark: its figures by hand-computed numbers, its rounds, its files."""

import dataclasses
import importlib.util
import math
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest

from hvdtrain import processes
from hvdtrain.job import JobError, World
from hvdtrain.measurement import (
    figures,
    input_speed,
    parallelism,
    records,
    simulated_device,
    tables,
    variants,
)
from hvdtrain.measurement.benchmark_options import BenchmarkOptions, is_workload
from hvdtrain.measurement.parallel_workloads import WORKLOADS, zipf

ROOT = pathlib.Path(__file__).parents[2]
OPTIONS = BenchmarkOptions(
    max_bytes=100_000, tables=("17", "1000"), columns=4, units=("5",)
)


def options(**changes):
    return dataclasses.replace(OPTIONS, **changes).with_defaults()


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


def kinds():
    """The figures of two kinds on two ranks: memory, bytes, and three rounds."""
    dense = {"weight_bytes": 800, "slot_bytes": 200, "sent_bytes": 5000.0, "loss": 0.5}
    chief = {
        "replicated": {**dense, "step_seconds": [0.004, 0.010, 0.004]},
        "row": {
            **dense,
            "weight_bytes": 400,
            "sent_bytes": 1000.0,
            "step_seconds": [0.001, 0.005, 0.003],
        },
    }
    other = {
        "replicated": {**dense, "loss": 0.25, "step_seconds": [0.004, 0.009, 0.005]},
        "row": {
            **dense,
            "weight_bytes": 300,
            "slot_bytes": 350,
            "sent_bytes": 1500.0,
            "step_seconds": [0.002, 0.004, 0.002],
        },
    }
    return parallelism.summarize([chief, other])


class TestParallelism:
    def test_figures_of_the_ranks(self):
        found = kinds()
        assert found["replicated"]["rounds"] == [0.004, 0.010, 0.005]
        assert found["replicated"]["loss"] == 0.375
        assert set(found["replicated"]["against_replicated"].values()) == {1}
        assert found["row"] == {
            "weight_bytes_by_rank": [400, 300],
            "slot_bytes_by_rank": [200, 350],
            "sent_bytes_by_rank": [1000.0, 1500.0],
            "loss": 0.5,
            "step_seconds": 0.003,
            "rounds": [0.002, 0.005, 0.003],
            # Of 650 and 1,000 bytes; ratios of 0.5, 0.5 and 0.6.
            "against_replicated": {
                "memory": 0.65,
                "sent_bytes": 0.3,
                "step_seconds": 0.5,
            },
        }

    def test_ids_are_drawn_by_zipfs_law(self):
        drawn = zipf(np.random.RandomState(0), 1000, (400, 500))
        assert (drawn.shape, drawn.min(), drawn.max()) == ((400, 500), 0, 999)
        weights = np.arange(1, 1001) ** -1.05
        wanted = 200_000 * weights / weights.sum()
        counts = np.bincount(drawn.ravel(), minlength=1000)
        # Five standard deviations.
        assert np.all(np.abs(counts - wanted) < 5 * np.sqrt(wanted))

    def test_ids_are_of_the_rank_and_their_tables(self):
        given = options(workload="recommender", batch_size=64)
        ids, targets = WORKLOADS["recommender"].samples(given, 0)
        assert ids.shape == (8, 64, 2)
        assert targets.shape == (8, 64, 1)
        assert ids.min() >= 0
        assert list(ids.max(axis=(0, 1)) < [17, 1000]) == [True, True]
        others, _ = WORKLOADS["recommender"].samples(given, 1)
        assert np.any(ids != others)
        # The most frequent row of a table is the same on all ranks, and not the first.
        most = [np.bincount(each[..., 1].ravel()).argmax() for each in (ids, others)]
        assert most[0] == most[1] > 0


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


class TestSimulatedBackwardPass:
    def test_each_gradient_is_used(self):
        model = simulated_device.build(backward_seconds=0.0, layers=3, units=2)
        zeros = np.zeros((4, 1), "float32")
        model.fit(zeros, zeros, batch_size=2, verbose=0)
        moved = [float(number) for number in model.optimizer._moved]
        # Two steps of 0.01 times a gradient of ones.
        assert moved == pytest.approx([-0.02] * 3)

    def test_the_last_layer_is_first(self, monkeypatch):
        slept = []
        now = [100.0]

        def sleep(seconds):
            slept.append(seconds)
            now[0] += seconds + 0.001  # sleeping takes a little longer

        monkeypatch.setattr(simulated_device.time, "sleep", sleep)
        monkeypatch.setattr(simulated_device.time, "perf_counter", lambda: now[0])
        keras.utils.set_random_seed(0)
        model = simulated_device.build(backward_seconds=0.3, layers=3, units=2)
        zeros = np.zeros((2, 1), "float32")
        model.fit(zeros, zeros, epochs=2, verbose=0)
        # The delays do not add up.
        assert slept == pytest.approx([0.1, 0.099, 0.099] * 2)

    def test_it_has_25_million_parameters(self):
        count = simulated_device.LAYERS * simulated_device.UNITS**2
        assert count == pytest.approx(25e6, rel=0.001)


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
        assert options(input=True).batch_size == 1000

    def test_message_sizes(self):
        sizes = options(max_bytes=64_003).message_sizes
        assert sizes == [1_000, 4_000, 16_000, 64_000]

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
            ("--tables=17,many", ["--tables", "numbers of rows"]),
            ("--seconds=-1", ["--seconds=-1", "[0, 120]"]),
            ("--seconds=nan", ["expected numbers", "--seconds"]),
            ("--compare=", ["--compare", "expected files"]),
            ("--compare=a.json,", ["--compare", "expected files"]),
            ("--input --plot=a.png", ["--input=True", "without --collectives and"]),
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
        "hosts": {"host1": 1},
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
        # JSON has no tuples.
        for name in ("tables", "units"):
            written["flags"][name] = list(written["flags"][name])
        records.write_json(path, written)
        assert records.read_json([path]) == {path: written}

    def test_not_a_number_is_not_written(self, tmp_path):
        with pytest.raises(ValueError, match="Out of range"):
            records.write_json(tmp_path / "result.json", {"seconds": math.nan})
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("name", ["missing/result", ".", "file/result"])
    @pytest.mark.parametrize("flag", ["json", "plot"])
    def test_a_path_that_cannot_be_written(self, tmp_path, name, flag):
        (tmp_path / "file").touch()
        with pytest.raises(JobError, match=f"--{flag}"):
            records.check(options(**{flag: str(tmp_path / name)}))

    def test_matplotlib_is_missing(self, tmp_path, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(JobError, match=r"matplotlib is missing.*pip install"):
            records.check(options(plot=str(tmp_path / "plot.png")))

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

    def test_a_plot(self, tmp_path):
        pytest.importorskip("matplotlib")
        records.write_plot(tmp_path / "training.png", result())
        rows = [{"bytes": 1000 * n, "seconds": {"MPI": n * 1e-6}} for n in (1, 2)]
        collectives = {**result(), "size": 2, "collectives": {"rows": rows}}
        records.write_plot(tmp_path / "collectives.png", collectives)
        of_kinds = {**result(), "size": 2, "parallelism": kinds()}
        records.write_plot(tmp_path / "parallelism.png", of_kinds)
        for path in tmp_path.iterdir():
            assert path.read_bytes().startswith(b"\x89PNG")
        assert len(list(tmp_path.iterdir())) == 3


class TestInputSpeed:
    def test_both_pipelines_of_each_format(self, monkeypatch):
        monkeypatch.setenv("HVDTRAIN_CACHE_DIR", "")
        measured = input_speed.measure(batch_size=8, rounds=2, seconds=0.01, samples=20)
        assert measured["TFRecord"]
        for speeds in measured.values():
            pipelines = speeds["samples_per_second"]
            assert list(pipelines) == ["data.batches", "tf.data"]
            assert all(speed > 0 for speed in pipelines.values())
            assert speeds["ratio"] > 0

    def test_both_pipelines_read_the_samples_of_the_file(self, tmp_path):
        for name, each in input_speed._formats().items():
            path = str(tmp_path / name)
            input_speed._write(each.open_writer(path), 12)
            values = {}
            for batches in (
                input_speed._sampled(each, path, 4),
                each.make_plain(path, 4),
            ):
                for batch in batches.take(6):
                    assert batch["x"].shape == (4, 64)
                    for x, y in zip(
                        batch["x"].numpy(), batch["y"].numpy(), strict=True
                    ):
                        assert (values.setdefault(y, x) == x).all()
            assert set(values) == set(range(12))

    def test_the_order_is_reversed_in_every_other_round(self, monkeypatch):
        order = []
        monkeypatch.setattr(input_speed, "_time", lambda made, seconds: len(order))
        pipelines = {name: lambda name=name: order.append(name) or [] for name in "ab"}
        speeds = input_speed._run_rounds(pipelines, rounds=2, seconds=1)
        assert order == ["a", "b", "b", "a"]
        assert speeds == {"a": [1, 4], "b": [2, 3]}


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

    def test_of_the_input(self):
        speeds = {"data.batches": 300_000.0, "tf.data": 200_000.0}
        measured = {"TFRecord": {"samples_per_second": speeds, "ratio": 1.5}}
        found = {**result(), "input": measured}
        found["flags"]["batch_size"] = 1000
        text = " ".join(tables.input_speed(found).split())
        assert "samples/s in batches of 1,000, from files in the page cache" in text
        assert "data.batches tf.data ratio TFRecord 300,000 200,000 1.50" in text

    def test_doubts(self):
        found = result()
        found["load_average"] = 2.5
        found["figures"]["split_seconds"]["overhead"] = -1e-6
        text = tables.training(found)
        assert "load average before was 2.5, and the ranks have 2 threads" in text
        assert "fewer than 3 rounds" in text
        assert "a part of the step is negative" in text

    def test_of_kinds_of_parallelism(self):
        found = {**result(), "parallelism": kinds()}
        found["flags"]["workload"] = "recommender"
        text = " ".join(tables.parallelism(found).split())
        assert (
            "recommender; tables of 4 columns and 17, 1,000 rows; 5, 1 units; sgd"
            in text
        )
        assert "replicated 1 kB 1.000 5 kB 1.000 5.000 ms 1.000 0.375000" in text
        assert "row 650 B 0.650 1.5 kB 0.300 3.000 ms 0.500 0.500000" in text

    def test_of_several_results(self):
        text = tables.comparison({"a": result(), "b": result()})
        (row,) = [line for line in text.splitlines() if line.startswith("samples/s")]
        assert row.split()[1:] == ["6,400", "6,400"]
