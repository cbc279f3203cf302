"""Cross-entropy and accuracy of logits whose classes are sharded over a model group.

Megatron's cross-entropy (Shoeybi et al. 2019, arXiv:1909.08053, section 3) for any
number of classes: the logits are never gathered.
"""

from collections.abc import Callable

import keras
import tensorflow as tf
from keras.src.backend.common.masking import set_keras_mask

from hvdtrain.collectives import transport
from hvdtrain.collectives.transport import Max, Min, Sum
from hvdtrain.parallel.layer import InModelGroup
from hvdtrain.parallel.mesh import Axes, Mesh
from hvdtrain.sharding.shards import Sharding


class ParallelSparseCategoricalCrossentropy(
    InModelGroup, keras.losses.SparseCategoricalCrossentropy
):
    """`keras.losses.SparseCategoricalCrossentropy` of logits that are sharded.

    The logits are the outputs of a `ColumnParallelDense` with `gather_output=False`:
    each rank has the logits of some classes. The loss is the loss of the full logits;
    its gradient is this rank's shard of the full gradient.

    The ranks exchange three float32 numbers for each label, however many classes there
    are: the maximum, the sum of the exponentials, and the logit of the label's class.

        bytes reduced by each rank = 3 * 4 * labels

    The ranks agree on the number of classes at the first call of an object: use another
    object for another number of classes.

    The computation is in float32 at least. For a label that is no class, the loss and
    the gradients are NaN on all ranks of the model group, as in TensorFlow on GPUs; on
    CPUs TensorFlow raises an error.

    Args:
        from_logits: must be True.
        axis: must be -1.
        label_smoothing: must be 0.
        mesh: the `Mesh`; by default the active one.
        others: as for `keras.losses.SparseCategoricalCrossentropy`.

    Raises:
        ValueError: for probabilities in place of logits, or another axis.
    """

    def __init__(
        self,
        from_logits: bool = False,
        ignore_class: int | None = None,
        reduction: str | None = "sum_over_batch_size",
        axis: int = -1,
        name: str = "sparse_categorical_crossentropy",
        dtype: str | keras.DTypePolicy | None = None,
        *,
        label_smoothing: float = 0.0,
        mesh: Mesh | Axes | None = None,
    ) -> None:
        if not from_logits:
            raise ValueError(
                "ParallelSparseCategoricalCrossentropy takes logits: a softmax needs "
                f"all classes. Received: from_logits={from_logits!r}. Pass "
                "from_logits=True, and leave out the softmax of the last layer."
            )
        if axis != -1:
            raise ValueError(
                "ParallelSparseCategoricalCrossentropy takes logits whose last axis is "
                f"sharded. Received: axis={axis!r}; expected -1."
            )
        if label_smoothing:
            raise ValueError(
                "ParallelSparseCategoricalCrossentropy has no label smoothing. "
                f"Received: label_smoothing={label_smoothing!r}; expected 0."
            )
        # By name: Keras 3.16 has label_smoothing before `name`.
        super().__init__(
            from_logits=from_logits,
            ignore_class=ignore_class,
            reduction=reduction,
            axis=axis,
            name=name,
            dtype=dtype,
        )
        self._ignore_class = ignore_class
        self._set_mesh(mesh)

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Return the loss of each label."""
        labels = _as_labels(y_true, y_pred)
        sharding = self.get_input_sharding(y_pred)
        if self._ignore_class is None:
            return _crossentropy(y_pred, labels, sharding)
        # The logits of an ignored label may be NaN: replace them before the loss is
        # computed, as Keras does.
        is_counted = labels != self._ignore_class
        logits = tf.where(is_counted[..., None], y_pred, tf.zeros_like(y_pred))
        losses = _crossentropy(logits, tf.where(is_counted, labels, 0), sharding)
        losses = tf.where(is_counted, losses, tf.zeros_like(losses))
        set_keras_mask(losses, is_counted)
        return losses


class ParallelSparseCategoricalAccuracy(
    InModelGroup, keras.metrics.SparseCategoricalAccuracy
):
    """`keras.metrics.SparseCategoricalAccuracy` of logits that are sharded.

    Of classes with equal logits, the lowest is the prediction, as in `argmax`. The
    ranks exchange two numbers for each label.

    Args:
        mesh: the `Mesh`; by default the active one.
        others: as for `keras.metrics.SparseCategoricalAccuracy`.
    """

    def __init__(
        self,
        name: str = "sparse_categorical_accuracy",
        dtype: str | keras.DTypePolicy | None = None,
        *,
        mesh: Mesh | Axes | None = None,
    ) -> None:
        super().__init__(name=name, dtype=dtype)
        self._fn = self._matches
        self._set_mesh(mesh)

    def _matches(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        y_pred = tf.convert_to_tensor(y_pred)
        labels = _as_labels(tf.convert_to_tensor(y_true), y_pred)
        sharding = self.get_input_sharding(y_pred)
        logits = _at_least_float32(y_pred)
        local_highest = tf.reduce_max(logits, -1)
        highest = _over_ranks(local_highest, Max, sharding)
        classes = tf.argmax(logits, -1) + sharding.local_slice.start
        # A rank without the highest logit gives a number above all classes.
        classes = tf.where(local_highest == highest, classes, sharding.size)
        # Not ==, which loses the static shape if one of the shapes is not known.
        matches = tf.equal(labels, _over_ranks(classes, Min, sharding))
        return tf.cast(matches, self.dtype)


def _as_labels(y_true: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    if len(y_true.shape) == len(logits.shape) and y_true.shape[-1] == 1:
        y_true = tf.squeeze(y_true, -1)
    return tf.cast(y_true, tf.int64)


def _at_least_float32(logits: tf.Tensor) -> tf.Tensor:
    return logits if logits.dtype == tf.float64 else tf.cast(logits, tf.float32)


def _crossentropy(
    logits: tf.Tensor, labels: tf.Tensor, sharding: Sharding
) -> tf.Tensor:
    classes = tf.range(
        sharding.local_slice.start, sharding.local_slice.stop, dtype=tf.int64
    )
    is_label = classes == labels[..., None]
    is_class = (labels >= 0) & (labels < sharding.size)

    @tf.custom_gradient
    def crossentropy(logits: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        highest = _over_ranks(tf.reduce_max(logits, -1), Max, sharding)
        shifted = logits - highest[..., None]
        exponentials = tf.exp(shifted)
        # Not a product with is_label: 0 times a logit of minus infinity is NaN.
        own = tf.reduce_sum(tf.where(is_label, shifted, tf.zeros_like(shifted)), -1)
        sums = tf.stack([tf.reduce_sum(exponentials, -1), own])
        total, label = tf.unstack(_over_ranks(sums, Sum, sharding))

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            by_logits = exponentials / total[..., None] - tf.cast(is_label, total.dtype)
            return by_logits * _or_nan(upstream, is_class)[..., None]

        return _or_nan(tf.math.log(total) - label, is_class), gradient

    return tf.cast(crossentropy(_at_least_float32(logits)), logits.dtype)


def _or_nan(values: tf.Tensor, is_valid: tf.Tensor) -> tf.Tensor:
    return tf.where(is_valid, values, tf.constant(float("nan"), values.dtype))


def _over_ranks(x: tf.Tensor, op: object, sharding: Sharding) -> tf.Tensor:
    return transport.combine(x, sharding.process_set, name="Vocabulary", op=op)
