"""A call of a `parse` function, with a check of what it returns."""

from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.data.formats import DataError
from hvdtrain.data.sources.source import Source


def parse(source: Source, raw: Any, count: tf.Tensor) -> Any:
    """Return `source.parse(raw)`: dense tensors of `count` samples.

    Args:
        count: number of samples in `raw`.

    Raises:
        DataError: a value is not a dense tensor. A step fails with a `DataError` if
            there are more or fewer samples: they could not be numbered.
    """
    assert source.parse
    # A function of its own, which AutoGraph converts.
    parsed = tf.function(source.parse)(raw)
    leaves = tf.nest.flatten(parsed)
    for leaf in leaves:
        if not isinstance(leaf, tf.Tensor) or leaf.shape.rank == 0:
            raise DataError(
                f"Received {leaf!r:.80} from parse; expected dense tensors of shape "
                "(samples, ...), such as ragged.to_tensor(shape=(None, 128))."
            )

    def check(expected: np.ndarray, *found: np.ndarray) -> np.ndarray:
        for number in found:
            if number != expected:
                raise DataError(
                    f"Received {number} samples from parse for {expected}; expected as "
                    "many: filter them when the files are written."
                )
        return expected

    counts = [count, *(tf.shape(leaf)[0] for leaf in leaves)]
    checked = tf.numpy_function(check, counts, count.dtype)
    with tf.control_dependencies([checked]):
        return tf.nest.map_structure(tf.identity, parsed)
