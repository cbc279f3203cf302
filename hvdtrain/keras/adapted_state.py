"""What preprocessing layers learn from samples, as states that are added over ranks.

Keras' `adapt` calls `reset_state`, then `update_state` for each batch, then
`finalize_state`. A state stands between the last two: it is exported, and added to that
of another rank, which gives the state of the samples of both.
"""

from collections.abc import Callable
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf
from keras.src.layers.preprocessing import discretization

from hvdtrain.job.world import JobError

# Of Discretization: up to this many values, 4 MB, are kept as they are.
EXACT_VALUES = 1 << 20


class AdaptedState(Protocol):
    """What one layer has learned from samples.

    Attributes:
        expected: the kind of values that the layer takes, for errors.
    """

    expected: str

    def accepts(self, dtype: tf.DType) -> bool:
        """Return whether the layer takes values of this type."""

    def prepare(self, shape: tf.TensorShape) -> None:
        """Build the layer for batches of this shape, and forget earlier samples."""

    def update(self, batch: tf.Tensor) -> None:
        """Add a batch, of shape (samples, ...)."""

    def export(self) -> Any:
        """Return the state, for `add` of another rank."""

    def add(self, exported: Any) -> None:
        """Add the samples of another rank."""

    def reset(self) -> None:
        """Forget all samples."""

    def finish(self) -> None:
        """Give the layer what follows from the state."""


class _Counts:
    """How often each token occurs, and for TF-IDF in how many samples.

    The order of the vocabulary, also of tokens that are equally frequent, and the
    weights are Keras': `finalize_state` computes them from the counts.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        is_text = isinstance(layer, keras.layers.TextVectorization)
        self._lookup = layer._lookup_layer if is_text else layer
        self._is_string = self._lookup.vocabulary_dtype == "string"
        self.expected = "text" if self._is_string else "integers"
        self.reset = layer.reset_state
        self.finish = layer.finalize_state

    @property
    def is_fixed(self) -> bool:
        """Whether the vocabulary is an argument of the layer."""
        return not hasattr(self._lookup, "token_counts")

    def accepts(self, dtype: tf.DType) -> bool:
        return dtype == tf.string if self._is_string else dtype.is_integer

    def prepare(self, shape: tf.TensorShape) -> None:
        self.reset()

    def update(self, batch: tf.Tensor) -> None:
        # Keras' `update_state` takes a batch of rank 1 for one sample.
        self._layer.update_state(
            tf.expand_dims(batch, -1) if batch.shape.rank == 1 else batch
        )

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
        return [vars(self._lookup)[x] for x in names if hasattr(self._lookup, x)]


class _Moments:
    """Number, mean and sum of squared deviations, in float64."""

    expected = "numbers"

    def __init__(self, layer: keras.layers.Normalization) -> None:
        self._layer = layer
        self.is_fixed = layer.input_mean is not None
        self.reset()

    def reset(self) -> None:
        self._count, self._mean, self._squares = 0, np.float64(0), np.float64(0)

    def accepts(self, dtype: tf.DType) -> bool:
        return dtype.is_floating or dtype.is_integer or dtype.is_bool

    def prepare(self, shape: tf.TensorShape) -> None:
        self.reset()
        # A number is a feature, as in Keras' `fit` and `FeatureSpace`.
        dims = [None, *(shape[1:] if len(shape) > 1 or not self._layer.axis else [1])]
        if not self._layer.built:
            self._layer.build(tuple(dims))
        keep = sorted(axis % len(dims) for axis in self._layer.axis)
        self._axes = tuple(axis for axis in range(len(dims)) if axis not in keep)
        received = tuple(dims[axis] for axis in keep)
        if received != (built := tuple(self._layer.adapt_mean.shape)):
            raise JobError(
                f"Received features of shape {received} for the layer "
                f"{self._layer.name}; expected {built}, for which it was built."
            )

    def update(self, batch: tf.Tensor) -> None:
        values = batch.numpy().astype(np.float64)
        if values.ndim == 1 and self._layer.axis:
            values = values[:, None]
        mean = values.mean(self._axes, keepdims=True)
        squares = np.square(values - mean).sum(self._axes)
        self.add((values.size // mean.size, mean.squeeze(self._axes), squares))

    def export(self) -> Any:
        return self._count, self._mean, self._squares

    def add(self, exported: Any) -> None:
        count, mean, squares = exported
        total = self._count + count
        delta = mean - self._mean
        self._mean = self._mean + delta * (count / total)
        self._squares = (
            self._squares + squares + np.square(delta) * (self._count * count / total)
        )
        self._count = total

    def finish(self) -> None:
        self._layer.adapt_mean.assign(self._mean)
        self._layer.adapt_variance.assign(self._squares / self._count)
        self._layer.finalize_state()


class _Quantiles:
    """The values of `Discretization`, and Keras' summary of those that are too many."""

    expected = "numbers"
    accepts = _Moments.accepts

    def __init__(self, layer: keras.layers.Discretization) -> None:
        self._layer = layer
        self.is_fixed = layer.num_bins is None
        self._values: list[np.ndarray] = []

    def reset(self) -> None:
        self._layer.reset_state()
        self._values = []

    def prepare(self, shape: tf.TensorShape) -> None:
        self.reset()

    def update(self, batch: tf.Tensor) -> None:
        self._append(batch.numpy().astype(np.float32).ravel())

    def export(self) -> Any:
        return self._layer.summary, self._values

    def add(self, exported: Any) -> None:
        summary, values = exported
        if self._layer.summary.size and summary.size:
            # Also where one is empty, it would compress the other.
            summary = discretization.merge_summaries(
                summary, self._layer.summary, self._layer.epsilon
            )
        self._layer.summary = summary if summary.size else self._layer.summary
        for array in values:
            self._append(array)

    def finish(self) -> None:
        self._summarize()
        self._layer.finalize_state()

    def _append(self, values: np.ndarray) -> None:
        if sum(map(len, self._values)) + len(values) > EXACT_VALUES:
            self._summarize()
        self._values.append(values)

    def _summarize(self) -> None:
        if self._values:
            self._layer.update_state(np.concatenate(self._values))
        self._values = []


_LOOKUPS = (
    *(keras.layers.StringLookup, keras.layers.IntegerLookup),
    keras.layers.TextVectorization,
)
_STATES: dict[tuple[type, ...], Callable[[Any], Any]] = {
    _LOOKUPS: _Counts,
    (keras.layers.Normalization,): _Moments,
    (keras.layers.Discretization,): _Quantiles,
}


def is_adaptable(layer: object) -> bool:
    """Return whether Keras' `adapt` would give the layer a state."""
    is_fixed = any(make(layer).is_fixed for make in _makers(layer))
    return hasattr(layer, "adapt") and not is_fixed


def make_state(layer: Any) -> AdaptedState:
    """Return an empty state of a layer.

    Raises:
        JobError: the layer has none, or it is an argument of the layer.
    """
    if not isinstance(layer, keras.layers.Layer):
        raise JobError(f"Received {layer!r:.80}; expected a layer of Keras to adapt.")
    name = f"the {type(layer).__name__} {layer.name}"
    if not hasattr(layer, "adapt"):
        raise JobError(
            f"Received {name}, which learns nothing from samples: leave it out."
        )
    if not (makers := _makers(layer)):
        raise JobError(
            f"Received {name}, whose adapt cannot be added over the ranks; expected "
            "Normalization, Discretization, IntegerLookup, StringLookup or "
            "TextVectorization: adapt it to all samples on every rank."
        )
    state = makers[0](layer)
    if state.is_fixed:
        raise JobError(
            f"Received {name}, which was made with its vocabulary, moments or bins: "
            "leave it out, or make it without them."
        )
    return state


def _makers(layer: object) -> list[Callable[[Any], Any]]:
    return [make for classes, make in _STATES.items() if isinstance(layer, classes)]
