"""Checks of the sources of `fit`, before the first step."""

import hashlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.data.sources.source import Source
from hvdtrain.job import JobError, World
from hvdtrain.job.agreement import fail_together, gather
from hvdtrain.job.world import SharedJobError
from hvdtrain.training.specs import EvalSpec, TrainSpec


def check_source(source: Source, world: World) -> None:
    """Raise an error unless one sample is the same on all ranks. A collective.

    A source that the ranks have sharded already, as scripts of Horovod do, differs in
    it: each rank would read a part of its shard.
    """
    with fail_together(world):
        digest = _digest(source.read(np.array([len(source) // 2])))
    digests = gather(world, digest)
    for rank, other in enumerate(digests):
        if other != digests[0]:
            raise SharedJobError(
                f"Received a source on rank {rank} with other samples than on rank 0; "
                "expected the same source, of all samples, on all ranks: fit shards "
                "it. With check_input=False samples may be random."
            )


def _digest(sample: Any) -> str:
    digest = hashlib.sha256()
    for leaf in tf.nest.flatten(sample):
        digest.update(f"{leaf.dtype} {leaf.shape}".encode())
        # The bytes of an array of objects are pointers.
        content = repr(leaf.tolist()) if leaf.dtype == object else leaf.tobytes()
        digest.update(content.encode() if isinstance(content, str) else content)
    return digest.hexdigest()


def check_validation(train_spec: TrainSpec, eval_spec: EvalSpec) -> None:
    """Raise `JobError` if the inputs of both differ in structure or rank.

    Without it the first evaluation would fail, after an epoch. Sizes may differ, as of
    images for a network with global pooling.
    """
    validation = eval_spec.batches()
    if validation is None:
        return
    first = train_spec.scale_from.step if train_spec.scale_from else 0
    training = train_spec.batches(first, first + 1)
    found, expected = (
        keras.utils.unpack_x_y_sample_weight(batches.element_spec)[0]
        for batches in (validation, training)
    )
    try:
        keras.tree.assert_same_structure(found, expected)
        is_same = all(map(_has_rank, tf.nest.flatten(found), tf.nest.flatten(expected)))
    except (TypeError, ValueError):
        is_same = False
    if not is_same:
        raise JobError(
            f"Received inputs to evaluate of {_text(found)}; expected "
            f"{_text(expected)}, as to train."
        )


def _has_rank(found: tf.TensorSpec, expected: tf.TensorSpec) -> bool:
    ranks = found.shape.rank, expected.shape.rank
    return None in ranks or ranks[0] == ranks[1]


def _text(specs: Any) -> str:
    def text(spec: tf.TensorSpec) -> str:
        shape = "" if spec.shape.rank is None else tuple(spec.shape[1:])
        return f"{spec.dtype.name} {shape}"

    return str(keras.tree.map_structure(text, specs))
