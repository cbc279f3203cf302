"""The numbers in the graph of a training step, which may differ by rank."""

import numpy as np
import tensorflow as tf

from hvdtrain.verify.trajectory import digest

_NOT_NUMBERS = (tf.string, tf.resource, tf.variant)


def constants(graph: tf.Graph | None) -> dict[str, str]:
    """Return the numbers in a graph as text, or their digests, by their names."""
    if graph is None:
        return {}
    found = {
        operation.name: _text(tf.make_ndarray(operation.get_attr("value")))
        for operation in graph.get_operations()
        if operation.type == "Const" and operation.outputs[0].dtype not in _NOT_NUMBERS
    }
    # Tensors of the script that a function reads.
    for outer, inner in getattr(graph, "captures", ()):
        if hasattr(outer, "numpy") and outer.dtype not in _NOT_NUMBERS:
            found[inner.op.name] = _text(outer.numpy())
    return found


def _text(value: np.ndarray) -> str:
    value = np.asarray(value)
    return f"{value.item():.6g}" if value.size == 1 else f"array {digest(value)}"
