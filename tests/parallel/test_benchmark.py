"""Kinds of parallelism in the benchmark, against numbers computed by hand."""

import numpy as np
import pytest

import hvdtrain.keras as hvd
from hvdtrain.job import World
from hvdtrain.measurement import recommender, running
from hvdtrain.measurement.kinds import BATCHES
from hvdtrain.measurement.options import Options

RANK, SIZE = hvd.rank(), hvd.size()
ROWS, COLUMNS, BATCH = (300, 17), 4, 32
# Of the dense layers: two columns of tables, 256 and 128 units, one output.
DENSE = (2 * COLUMNS * 256 + 256) + (256 * 128 + 128) + (128 + 1)


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
        "strategy": "horovod",
        "devices": 2,
        "collectives": False,
        "max_bytes": 1000,
        "rounds": 2,
        "seconds": 0.01,
        "batch_size": BATCH,
        "steps_per_execution": 1,
        "dataset": "auto",
        "data_dir": None,
        "backward_ms": 0.0,
        "tables": tuple(map(str, ROWS)),
        "columns": COLUMNS,
        "optimizer": "momentum",
        "seed": 0,
        "consistency_steps": 0,
        "project": (),
        "json": None,
        "plot": None,
    }
    return Options(**values | changes).with_defaults()
