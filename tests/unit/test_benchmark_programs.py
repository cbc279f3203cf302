"""The programs of benchmarks/: figures by hand-computed numbers, and their tables."""

import dataclasses
import importlib.util
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest

from benchmarks import (
    allreduce,
    backward,
    input_pipelines,
    input_speed,
    kinds,
    parallelism,
)
from benchmarks.allreduce import AllreduceOptions
from benchmarks.loads import zipf
from benchmarks.parallel_workloads import WORKLOADS
from benchmarks.parallelism import ParallelismOptions
from hvdtrain import flag_fields
from hvdtrain.benchmark import figures
from hvdtrain.benchmark.benchmark_options import BenchmarkOptions
from hvdtrain.job import JobError, World, launchers

ROOT = pathlib.Path(__file__).parents[2]

# What `conditions.describe` returns.
CONDITIONS = {
    "machine": "a machine",
    "load_average": 0.5,
    "versions": {"hvdtrain": "0"},
    "hosts": ["host1", "host1"],
    "threads": [1, 1],
    "size": 2,
    "controller": "MPI",
    "path": "shared memory",
}


def options(**changes):
    given = {"tables": ("17", "1000"), "columns": 4, "units": ("5",), **changes}
    return ParallelismOptions(**given).with_defaults()


def two_kinds():
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
    return kinds.summarize([chief, other])


class TestParallelism:
    def test_figures_of_the_ranks(self):
        found = two_kinds()
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
        given = options(batch_size=64)
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


class TestSimulatedBackwardPass:
    def test_each_gradient_is_used(self):
        model = backward.build(backward_seconds=0.0, layers=3, units=2)
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

        monkeypatch.setattr(backward.time, "sleep", sleep)
        monkeypatch.setattr(backward.time, "perf_counter", lambda: now[0])
        keras.utils.set_random_seed(0)
        model = backward.build(backward_seconds=0.3, layers=3, units=2)
        zeros = np.zeros((2, 1), "float32")
        model.fit(zeros, zeros, epochs=2, verbose=0)
        # The delays do not add up.
        assert slept == pytest.approx([0.1, 0.099, 0.099] * 2)

    def test_it_has_25_million_parameters(self):
        count = backward.LAYERS * backward.UNITS**2
        assert count == pytest.approx(25e6, rel=0.001)


class TestInputSpeed:
    def test_both_pipelines_of_each_format(self, monkeypatch):
        monkeypatch.setenv("HVDTRAIN_CACHE_DIR", "")
        measured = input_pipelines.measure(
            batch_size=8, rounds=2, seconds=0.01, samples=20
        )
        assert measured["TFRecord"]
        for speeds in measured.values():
            pipelines = speeds["samples_per_second"]
            assert list(pipelines) == ["data.batches", "tf.data"]
            assert all(speed > 0 for speed in pipelines.values())
            assert speeds["ratio"] > 0

    def test_both_pipelines_read_the_samples_of_the_file(self, tmp_path):
        for name, each in input_pipelines._formats().items():
            path = str(tmp_path / name)
            input_pipelines._write(each.open_writer(path), 12)
            values = {}
            for batches in (
                input_pipelines._sampled(each, path, 4),
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
        monkeypatch.setattr(input_pipelines, "_time", lambda made, seconds: len(order))
        pipelines = {name: lambda name=name: order.append(name) or [] for name in "ab"}
        speeds = input_pipelines._run_rounds(pipelines, rounds=2, seconds=1)
        assert order == ["a", "b", "b", "a"]
        assert speeds == {"a": [1, 4], "b": [2, 3]}


class TestAllreduce:
    def test_message_sizes(self):
        sizes = AllreduceOptions(max_bytes=64_003).message_sizes
        assert sizes == [1_000, 4_000, 16_000, 64_000]

    def test_listed_sizes_replace_the_largest(self):
        given = AllreduceOptions(max_bytes=64_000, sizes=("1000", "4000000003", "7"))
        assert given.message_sizes == [1_000, 4_000_000_000, 4]

    def test_the_table(self):
        text = " ".join(allreduce.table(collectives()).split())
        assert "2 on host1; MPI; reduction: shared memory" in text
        # On two ranks, each sends as many bytes as the message has.
        assert "1,000 2.0 us 0.50 GB/s 2,000 8.0 us 0.25 GB/s" in text

    def test_without_pytorch_it_does_not_start(self, monkeypatch):
        monkeypatch.setattr(
            flag_fields, "read_flags", lambda _: AllreduceOptions(torch=True)
        )
        monkeypatch.setattr(launchers, "launch", lambda: launchers.Launch("mpirun", 2))
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(JobError, match="PyTorch is not installed"):
            allreduce.main()

    def test_pytorch_reduces_to_the_sum(self, monkeypatch):
        torch = pytest.importorskip("torch")
        from benchmarks import torch_allreduce

        # Of 1 on rank 0, and 5 on all others.
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda x: x.add_(5))
        torch_allreduce.check_sum(World(size=3))
        with pytest.raises(JobError, match="reduced 1 to 2 to 6; expected the sum, 3"):
            torch_allreduce.check_sum(World(size=2))


def collectives():
    rows = [
        {"bytes": 1000, "seconds": {"MPI": 2e-6}},
        {"bytes": 2000, "seconds": {"MPI": 8e-6}},
    ]
    flags = dataclasses.asdict(AllreduceOptions())
    return {**CONDITIONS, "flags": flags, "collectives": {"rows": rows}}


def of_kinds():
    flags = dataclasses.asdict(options())
    return {**CONDITIONS, "flags": flags, "parallelism": two_kinds()}


class TestTables:
    def test_of_the_input(self):
        speeds = {"data.batches": 300_000.0, "tf.data": 200_000.0}
        found = {
            **CONDITIONS,
            "flags": {"batch_size": 1000, "rounds": 5},
            "input": {"TFRecord": {"samples_per_second": speeds, "ratio": 1.5}},
        }
        text = " ".join(input_speed.table(found).split())
        assert "samples/s in batches of 1,000, from files in the page cache" in text
        assert "data.batches tf.data ratio TFRecord 300,000 200,000 1.50" in text

    def test_of_kinds_of_parallelism(self):
        text = " ".join(parallelism.table(of_kinds()).split())
        assert (
            "recommender; tables of 4 columns and 17, 1,000 rows; 5, 1 units; sgd"
            in text
        )
        assert "replicated 1 kB 1.000 5 kB 1.000 5.000 ms 1.000 0.375000" in text
        assert "row 650 B 0.650 1.5 kB 0.300 3.000 ms 0.500 0.500000" in text


def test_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks import charts

    ranks = [{"train": [[0.2]], "function": [[0.1]], "bare": [[0.1]]}]
    given = BenchmarkOptions().with_defaults()
    training = {
        **CONDITIONS,
        "flags": dataclasses.asdict(given),
        "figures": figures.summarize(ranks, given, 1),
    }
    for number, result in enumerate([collectives(), of_kinds(), training]):
        path = tmp_path / f"{number}.png"
        charts.draw(result, path)
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("program", "argument", "words"),
    [
        ("parallelism", "--tables=17,many", ["--tables", "numbers of rows"]),
        ("parallelism", "", ["1 rank", "horovodrun -np 2"]),
        ("allreduce", "--max_bytes=1", ["--max_bytes=1", "4000"]),
        ("allreduce", "--sizes=1000,5e3", ["--sizes", "from 4 to 4000000000"]),
        ("allreduce", "--sizes=4000000001", ["--sizes", "from 4 to 4000000000"]),
        ("allreduce", "--seconds=nan", ["expected a number", "--seconds"]),
        ("allreduce", "", ["1 rank", "mpirun -np 2"]),
    ],
)
def test_what_cannot_be_measured_is_one_line(program, argument, words):
    command = [sys.executable, "-m", f"benchmarks.{program}", *argument.split()]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == (2 if argument else 1)
    assert done.stderr.count("\n") == 1
    assert all(word in done.stderr for word in words), done.stderr
