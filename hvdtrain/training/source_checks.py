"""Checks of the sources of `fit`, before the first step."""

import hashlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.data.sources.source import Source
from hvdtrain.job import JobError
from hvdtrain.training.specs import EvalSpec, TrainSpec


def digest_of_sample(source: Source) -> str:
    """Return a digest of one sample, from the middle.

    A source that the ranks have sharded already differs in it: each sample would be
    read by one of them, and dealt to all.
    """
    sample = source.read(np.array([len(source) // 2]))
    digest = hashlib.sha256()
    for leaf in tf.nest.flatten(sample):
        digest.update(f"{leaf.dtype} {leaf.shape}".encode())
        # The bytes of an array of objects are pointers.
        content = repr(leaf.tolist()) if leaf.dtype == object else leaf.tobytes()
        digest.update(content.encode() if isinstance(content, str) else content)
    return digest.hexdigest()[:16]


def check_validation(train_spec: TrainSpec, eval_spec: EvalSpec) -> None:
    """Raise `JobError` if the inputs of both differ in structure, type or shape.

    Without it the first evaluation would fail, after an epoch.
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
        is_same = all(map(_is_alike, tf.nest.flatten(found), tf.nest.flatten(expected)))
    except ValueError:
        is_same = False
    if not is_same:
        raise JobError(
            f"Received inputs to evaluate of {_text(found)}; expected "
            f"{_text(expected)}, as to train."
        )


def _is_alike(found: tf.TensorSpec, expected: tf.TensorSpec) -> bool:
    return found.dtype == expected.dtype and found.shape[1:].is_compatible_with(
        expected.shape[1:]
    )


def _text(specs: Any) -> str:
    return str(
        keras.tree.map_structure(
            lambda spec: f"{spec.dtype.name} {tuple(spec.shape[1:])}", specs
        )
    )
