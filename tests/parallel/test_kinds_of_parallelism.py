"""Kinds of parallelism beside each other, against numbers computed by hand."""

import numpy as np
import pytest

import hvdtrain.keras as hvd
from benchmarks import kinds as measured_kinds
from benchmarks import parallel_workloads
from benchmarks.parallel_workloads import BATCHES, WORKLOADS
from benchmarks.parallelism import ParallelismOptions
from hvdtrain.job import World

RANK, SIZE = hvd.rank(), hvd.size()
ROWS, COLUMNS, BATCH = (300, 17), 4, 32
# Of the dense layers: two tables' columns, 6 units, one output.
DENSE = (2 * COLUMNS * 6 + 6) + (6 + 1)


@pytest.fixture(scope="module")
def world():
    return World(
        rank=RANK,
        size=SIZE,
        local_rank=hvd.local_rank(),
        local_size=hvd.local_size(),
    )


def options(workload, **changes):
    values = {
        "workload": workload,
        "rounds": 1,
        "seconds": 0.01,
        "batch_size": BATCH,
        "steps_per_execution": 1,
        "tables": tuple(map(str, ROWS)),
        "columns": COLUMNS,
        "units": ("6",),
        "optimizer": "momentum",
    }
    return ParallelismOptions(**values | changes).with_defaults()


def run(world, given):
    kinds = measured_kinds.measure(given, world)
    losses = [each["loss"] for each in kinds.values()]
    np.testing.assert_allclose(losses, losses[0], atol=1e-6)
    for figures in kinds.values():
        assert len(figures["rounds"]) == given.rounds
        assert min(figures["rounds"]) <= figures["step_seconds"]
    return kinds


def check_memory(kinds, name, elements):
    # Momentum has a slot for each weight.
    assert kinds[name]["weight_bytes_by_rank"][RANK] == 4 * elements
    assert kinds[name]["slot_bytes_by_rank"][RANK] == 4 * elements


class Asked:
    """Distinct ids of a step that each rank asks each rank for, in one table.

    Args:
        ids: of all ranks, of shape (ranks, samples).
        holders: `holders(row)` returns the ranks that hold columns of a row.
        widths: how many columns each rank holds of the rows that it has.
    """

    def __init__(self, ids, holders, widths):
        self._counts = np.zeros([SIZE, SIZE], int)
        self._widths = widths
        for rank, mine in enumerate(ids):
            for row in set(mine.tolist()):
                self._counts[rank, holders(row)] += 1

    def sent(self, rank):
        """Bytes of int64 ids, float32 rows for others, and gradients of others'."""
        others = [other for other in range(SIZE) if other != rank]
        return sum(
            8 * self._counts[rank, other]
            + 4 * self._widths[rank] * self._counts[other, rank]
            + 4 * self._widths[other] * self._counts[rank, other]
            for other in others
        )


@pytest.mark.release
def test_recommender(world):
    given = options("recommender")
    kinds = run(world, given)
    assert list(kinds) == ["replicated", "row", "column", "tables"]
    dense = 2 * (SIZE - 1) * 4 * DENSE // SIZE
    ids = np.stack(
        [WORKLOADS["recommender"].samples(given, rank)[0] for rank in range(SIZE)]
    )
    assert ids.shape == (SIZE, BATCHES, BATCH, len(ROWS))
    sent = {name: kinds[name]["sent_bytes_by_rank"][RANK] - dense for name in kinds}
    # Of int32 ids and float32 rows, repeated ones too.
    assert sent["replicated"] == (SIZE - 1) * len(ROWS) * BATCH * (4 + 4 * COLUMNS)

    def exchanged(heads, *tables):
        """The mean over the batches, with the numbers of ids that go before them."""
        asked = [
            Asked(ids[:, batch, :, table], *tables[table])
            for batch in range(BATCHES)
            for table in range(len(ROWS))
        ]
        return sum(each.sent(RANK) for each in asked) / BATCHES + 8 * heads

    rows = [lambda row: [int(row >= 150)], lambda row: [int(row >= 9)]]
    both = lambda row: [0, 1]  # noqa: E731
    assert sent["row"] == exchanged(2, *((each, [4, 4]) for each in rows))
    assert sent["column"] == exchanged(2, (both, [2, 2]), (both, [2, 2]))
    assert sent["tables"] == exchanged(2, (both, [2, 2]), (lambda row: [1], [0, 4]))

    check_memory(kinds, "replicated", DENSE + sum(ROWS) * COLUMNS)
    check_memory(kinds, "row", DENSE + (150 + [9, 8][RANK]) * COLUMNS)
    check_memory(kinds, "column", DENSE + sum(ROWS) * COLUMNS // 2)
    check_memory(kinds, "tables", DENSE + 300 * 2 + [0, 17 * COLUMNS][RANK])
    whole, part = DENSE + sum(ROWS) * COLUMNS, DENSE + 159 * COLUMNS
    assert kinds["row"]["against_replicated"]["memory"] == part / whole


@pytest.mark.release
def test_wide(world, monkeypatch):
    # Kernels of 1,200 elements are fully sharded.
    monkeypatch.setattr(parallel_workloads, "UNITS", 30)
    monkeypatch.setattr(parallel_workloads, "WIDE_UNITS", 40)
    kinds = run(world, options("wide"))
    names = ["replicated", "state", "full", "gathered", "model", "pipeline"]
    assert list(kinds) == names
    widening, narrowing, last = 31 * 40, 41 * 30, 31 * 10
    whole = 4 * (widening + narrowing) + last
    check_memory(kinds, "replicated", whole)
    # Each rank has the biases of the narrow layers.
    check_memory(kinds, "model", 4 * (widening + narrowing + 30) // 2 + last)
    kernels = 4 * 8 * 1200
    small = 4 * whole - kernels
    for name in ("full", "gathered"):
        weights = kinds[name]["weight_bytes_by_rank"]
        assert kinds[name]["slot_bytes_by_rank"] == weights
        assert sum(weights) == kernels + SIZE * small
        # Shards are of whole cache lines.
        assert max(weights) - min(weights) <= 8 * 64
    check_memory(kinds, "pipeline", 2 * (widening + narrowing) + [0, last][RANK])
    slots = kinds["state"]["slot_bytes_by_rank"]
    assert kinds["state"]["weight_bytes_by_rank"] == [4 * whole] * SIZE
    assert sum(slots) == 4 * whole
    sent = {name: kinds[name]["sent_bytes_by_rank"] for name in kinds}
    assert sent["replicated"] == [4 * whole] * SIZE
    # An allreduce of the gradients, and an allgather of this rank's weights.
    assert sent["state"] == [4 * whole + each for each in slots]
    # Two gathers of this rank's shards, or one, and a reducescatter of the kernels.
    shards = [each - small for each in kinds["full"]["weight_bytes_by_rank"]]
    assert sent["full"] == [2 * each + kernels // 2 + small for each in shards]
    assert sent["gathered"] == [each + kernels // 2 + small for each in shards]
    # The samples of all ranks: four sums of outputs, and three of gradients by inputs.
    activations = 4 * SIZE * BATCH * 30
    assert sent["model"] == [7 * activations] * SIZE
    # At the one cut, outputs, gradients; the loss, two numbers.
    assert sent["pipeline"] == [activations + 12] * SIZE
