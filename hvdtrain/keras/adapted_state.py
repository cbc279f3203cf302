"""What preprocessing layers learn from samples, as states that are added over ranks.

Keras' `adapt` calls `reset_state`, then `update_state` for each batch, then
`finalize_state`. A state is what stands between the last two: `update` adds a batch of
shape (samples, ...), and `add` what another rank has exported.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.layers.preprocessing import discretization

from hvdtrain.job.world import JobError

# Of Discretization: up to this many values, 4 MB, are kept as they are.
EXACT_VALUES = 1 << 20


class _Counts:
    """How often each token occurs, and for TF-IDF in how many samples.

    `finalize_state` computes the order of the vocabulary, also of tokens that are
    equally frequent, and the weights.
    """

    def __init__(self, layer: Any) -> None:
        is_text = isinstance(layer, keras.layers.TextVectorization)
        self._layer, self._lookup = layer, layer._lookup_layer if is_text else layer
        self.is_fixed = not hasattr(self._lookup, "token_counts")
        self._expected = {"string": "text"}.get(layer.compute_dtype, "integers")
        self.reset, self.finish = layer.reset_state, layer.finalize_state

    def update(self, batch: tf.Tensor) -> None:
        _check_dtype(batch.dtype, self._expected)
        # Keras' `update_state` takes a batch of rank 1 for one sample.
        is_flat = batch.shape.rank == 1
        self._layer.update_state(tf.expand_dims(batch, -1) if is_flat else batch)

    def export(self) -> Any:
        tables = [[x.numpy() for x in table.export()] for table in self._tables()]
        return tables, int(getattr(self._lookup, "num_documents", 0))

    def add(self, exported: Any) -> None:
        tables, num_documents = exported
        for table, (keys, counts) in zip(self._tables(), tables, strict=True):
            tokens = tf.constant(keys, table.key_dtype)
            table.insert(tokens, counts + table.lookup(tokens))
        if num_documents:
            self._lookup.num_documents.assign_add(num_documents)

    def _tables(self) -> list[Any]:
        names = ("token_counts", "token_document_counts")
        return [getattr(self._lookup, x) for x in names if hasattr(self._lookup, x)]


class _Moments:
    """Number, mean and sum of squared deviations, in float64."""

    def __init__(self, layer: keras.layers.Normalization) -> None:
        self._layer = layer
        self.is_fixed = layer.input_mean is not None
        self.reset()

    def reset(self) -> None:
        self._count, self._mean, self._squares = 0, np.float64(0), np.float64(0)

    def update(self, batch: tf.Tensor) -> None:
        _check_dtype(batch.dtype, "numbers")
        values = batch.numpy().astype(np.float64)
        if values.ndim == 1 and self._layer.axis:
            # A number is a feature, as in Keras' `fit` and `FeatureSpace`.
            values = values[:, None]
        if not self._layer.built:
            self._layer.build((None, *values.shape[1:]))
        keep = [axis % values.ndim for axis in self._layer.axis]
        axes = tuple(axis for axis in range(values.ndim) if axis not in keep)
        mean = values.mean(axes, keepdims=True)
        squares = np.square(values - mean).sum(axes)
        self.add((values.size // mean.size, mean.squeeze(axes), squares))

    def export(self) -> Any:
        return self._count, self._mean, self._squares

    def add(self, exported: Any) -> None:
        count, mean, squares = exported
        total, delta = self._count + count, mean - self._mean
        between = np.square(delta) * (self._count * count / total)
        self._squares = self._squares + squares + between
        self._count, self._mean = total, self._mean + delta * (count / total)

    def finish(self) -> None:
        self._layer.adapt_mean.assign(self._mean)
        self._layer.adapt_variance.assign(self._squares / self._count)
        self._layer.finalize_state()


class _Quantiles:
    """The values of `Discretization`, and Keras' summary of those that are too many."""

    def __init__(self, layer: keras.layers.Discretization) -> None:
        self._layer = layer
        self.is_fixed = layer.num_bins is None
        self._values: list[np.ndarray] = []

    def reset(self) -> None:
        self._layer.reset_state()
        self._values = []

    def update(self, batch: tf.Tensor) -> None:
        _check_dtype(batch.dtype, "numbers")
        values = batch.numpy().astype(np.float32).ravel()
        if sum(map(len, self._values)) + len(values) > EXACT_VALUES:
            self._summarize()
        self._values.append(values)

    def export(self) -> Any:
        return self._layer.summary, self._values

    def add(self, exported: Any) -> None:
        summary, values = exported
        own, epsilon = self._layer.summary, self._layer.epsilon
        # Also where one is empty, it would compress the other.
        if own.size and summary.size:
            summary = discretization.merge_summaries(summary, own, epsilon)
        self._layer.summary = summary if summary.size else own
        for array in values:
            self.update(tf.constant(array))

    def finish(self) -> None:
        self._summarize()
        self._layer.finalize_state()

    def _summarize(self) -> None:
        if self._values:
            self._layer.update_state(np.concatenate(self._values))
        self._values = []


AdaptedState = _Counts | _Moments | _Quantiles
_STATES: tuple[tuple[Any, Any], ...] = (
    ((keras.layers.StringLookup, keras.layers.IntegerLookup), _Counts),
    (keras.layers.TextVectorization, _Counts),
    (keras.layers.Normalization, _Moments),
    (keras.layers.Discretization, _Quantiles),
)


def is_adaptable(layer: object) -> bool:
    """Return whether Keras' `adapt` would give the layer a state."""
    state = _find_state(layer)
    return hasattr(layer, "adapt") and not (state and state.is_fixed)


def make_state(layer: object) -> AdaptedState:
    """Return an empty state. Raise a `JobError` if the layer cannot be adapted."""
    state = _find_state(layer)
    if not state:
        raise JobError(
            f"Received {layer!r:.80}; expected Normalization, Discretization, "
            "IntegerLookup, StringLookup or TextVectorization: leave it out. Other "
            "layers of Keras learn nothing from samples."
        )
    if state.is_fixed:
        raise JobError(
            f"Received {layer!r:.80}, which was made with its vocabulary, moments or "
            "bins: leave it out, or make it without them."
        )
    return state


def _check_dtype(dtype: tf.DType, expected: str) -> None:
    kind = "text" if dtype == tf.string else "numbers"
    if expected not in (kind, "integers" if dtype.is_integer else kind):
        raise TypeError(f"Received {dtype.name}; expected {expected}.")


def _find_state(layer: object) -> AdaptedState | None:
    return next((make(layer) for cls, make in _STATES if isinstance(layer, cls)), None)
