"""Detection of ranks of one replica of a model that receive different samples."""

import functools

import keras
import tensorflow as tf

from hvdtrain.collectives import transport
from hvdtrain.collectives.process_sets import needs_communication
from hvdtrain.keras.variables import hook_of
from hvdtrain.sharding.shards import has_parts_elsewhere

_MARK = "_hvdtrain_compares_samples"
# Integers below it are exact in float32, and their sum with zeros is.
_MODULUS = 1 << 20


def compare_along_model(model: keras.Model) -> None:
    """Makes the steps of a model fail where ranks along `model` got different samples.

    The ranks of a model group are one replica. Of each batch in training, and in the
    evaluation of a divided model, they compare a fingerprint of the first sample.
    """
    if getattr(model, _MARK, False):
        return
    setattr(model, _MARK, True)
    for name, compare in (
        ("train_step", _compare_and_step),
        ("test_step", _compare_and_test),
    ):
        setattr(model, name, functools.partial(compare, model, getattr(model, name)))


def _compare_and_test(model, step, data):
    # One rank alone may evaluate a model of which nothing is divided.
    if not has_parts_elsewhere(model.variables):
        return step(data)
    return _compare_and_step(model, step, data)


def _compare_and_step(model, step, data):
    # The optimizer of now: a model may be compiled again.
    hook = hook_of(getattr(model, "optimizer", None))
    axis = hook.mesh.model if hook and hook.mesh else None
    if axis and needs_communication(axis.process_set):
        numbers = fingerprints(data, axis)
        check_equal(transport.combine(numbers, axis.process_set, name="Samples"))
    return step(data)


def fingerprints(data: object, axis: object) -> tf.Tensor:
    """Returns a vector whose sum over ranks has the fingerprint of each of them.

    The fingerprint is a function of the bits of the first sample: it does not depend
    on the order of a sum, which may differ by rank.

    Args:
        data: nest of the tensors of a batch; may have None in it.
        axis: the `Axis` of a mesh along which the ranks are compared.
    """
    total = tf.zeros([], tf.int32)
    for tensor in keras.tree.flatten(data):
        if tensor is None or isinstance(tensor, tf.RaggedTensor | tf.SparseTensor):
            continue
        if tf.as_dtype(tensor.dtype) != tf.string and len(tensor.shape):
            row = tf.cast(tensor[:1], tf.float32)
            total += tf.reduce_sum(tf.bitcast(row, tf.int32))
    return tf.one_hot(axis.index, axis.size) * tf.cast(total % _MODULUS, tf.float32)


def check_equal(numbers: tf.Tensor) -> None:
    """Raises an InvalidArgumentError on each rank if these fingerprints differ."""
    tf.debugging.assert_equal(
        numbers,
        tf.fill(tf.shape(numbers), numbers[0]),
        "The ranks of one replica of a model received different samples. Give all of "
        "them the same data in the same order: read by mesh.data.index and "
        "mesh.data.size in place of hvd.rank() and hvd.size(), and pass shuffle=False "
        "to fit, or call keras.utils.set_random_seed with the same seed on each rank.",
    )
