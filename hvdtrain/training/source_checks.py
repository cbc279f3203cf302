"""Checks of the sources of `fit`, before the first step."""

from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.data import DataError
from hvdtrain.data.sources.source import Source, as_source
from hvdtrain.job import World
from hvdtrain.job.agreement import fail_together, gather
from hvdtrain.job.world import SharedJobError
from hvdtrain.training.inputs import digest


def as_samples(data: Any) -> Source:
    """Return a source of samples for `fit`; see `as_source`.

    Raises:
        DataError: it is a list of the arrays of a data set, which Keras takes.
    """
    arrays = data if isinstance(data, list) and 1 < len(data) <= 3 else []
    lengths = {len(a) if isinstance(a, np.ndarray) and a.ndim else 0 for a in arrays}
    if len(lengths) == 1 and (length := lengths.pop()) > len(arrays):
        raise DataError(
            f"Received a list of {len(arrays)} arrays of {length} samples; expected a "
            "tuple: the elements of a list are samples."
        )
    return as_source(data)


def check_source(source: Source, world: World) -> None:
    """Raise an error unless one sample is the same on all ranks. A collective.

    A source that the ranks have sharded already, as scripts of Horovod do, differs in
    it: each rank would read a part of its shard.
    """
    with fail_together(world):
        sample = source.read(np.array([len(source) // 2]))
        found = digest(tf.nest.map_structure(tf.convert_to_tensor, sample))
    for rank, other in enumerate(digests := gather(world, found)):
        if other != digests[0]:
            raise SharedJobError(
                f"Received a source on rank {rank} with other samples than on rank 0; "
                "expected the same source, of all samples, on all ranks: fit shards "
                "it. With check_input=False samples may be random."
            )
