"""Cross-entropy and accuracy of logits that are divided by classes.

Megatron's cross-entropy (Shoeybi et al. 2019, arXiv:1909.08053, section 3) for any
number of classes: the logits are never gathered.
"""

import keras
import tensorflow as tf
from keras.src.backend import set_keras_mask

from hvdtrain.collectives import transport
from hvdtrain.collectives.transport import Max, Min, Sum
from hvdtrain.parallel.layer import InModelGroup


class ParallelSparseCategoricalCrossentropy(
    InModelGroup, keras.losses.SparseCategoricalCrossentropy
):
    """`keras.losses.SparseCategoricalCrossentropy` of logits that are divided.

    The logits are the outputs of a `ColumnParallelDense` with `gather_output=False`:
    each rank has those of some classes. The loss, and its gradient by these logits, are
    those of the dense twin.

    The ranks exchange three float32 numbers for each label, however many classes there
    are: the maximum, the sum of the exponentials, and the logit of the label's class.

        bytes reduced by each rank = 3 * 4 * labels

    An object is for one number of classes, on which the ranks agree at its first call.

    Logits are computed with in float32 at least. The loss, and the gradients, of a
    label that is no class are NaN, as on GPUs in TensorFlow, on all ranks of the model
    group; on CPUs TensorFlow raises an error.

    Args:
        from_logits: must be True.
        ignore_class: as for the dense twin.
        reduction: as for the dense twin.
        axis: must be -1.
        name: as for the dense twin.
        dtype: as for the dense twin.
        mesh: the `Mesh`; by default the active one.

    Raises:
        ValueError: for probabilities in place of logits, or another axis.
    """

    def __init__(
        self,
        from_logits=False,
        ignore_class=None,
        reduction="sum_over_batch_size",
        axis=-1,
        name="sparse_categorical_crossentropy",
        dtype=None,
        *,
        mesh=None,
    ):
        if not from_logits:
            raise ValueError(
                "ParallelSparseCategoricalCrossentropy takes logits: a softmax needs "
                f"all classes. Received: from_logits={from_logits!r}. Pass "
                "from_logits=True, and leave out the softmax of the last layer."
            )
        if axis != -1:
            raise ValueError(
                "ParallelSparseCategoricalCrossentropy takes logits whose last axis is "
                f"divided. Received: axis={axis!r}; expected -1."
            )
        super().__init__(from_logits, ignore_class, reduction, axis, name, dtype)
        self._set_mesh(mesh)

    def call(self, y_true, y_pred):
        """Return the loss of each label."""
        labels = _labels_of(y_true, y_pred)
        sharding = self.get_input_sharding(y_pred)
        if self.ignore_class is None:
            return _crossentropy(y_pred, labels, sharding)
        # As in Keras: the logits of an ignored label may be anything, NaN too.
        is_counted = labels != self.ignore_class
        logits = tf.where(is_counted[..., None], y_pred, tf.zeros_like(y_pred))
        losses = _crossentropy(logits, tf.where(is_counted, labels, 0), sharding)
        losses = tf.where(is_counted, losses, tf.zeros_like(losses))
        set_keras_mask(losses, is_counted)
        return losses


class ParallelSparseCategoricalAccuracy(
    InModelGroup, keras.metrics.SparseCategoricalAccuracy
):
    """`keras.metrics.SparseCategoricalAccuracy` of logits that are divided.

    Of equal logits the lowest class is the prediction, as in `argmax`. The ranks
    exchange two numbers for each label.

    Args:
        name: as for the dense twin.
        dtype: as for the dense twin.
        mesh: the `Mesh`; by default the active one.
    """

    def __init__(self, name="sparse_categorical_accuracy", dtype=None, *, mesh=None):
        super().__init__(name=name, dtype=dtype)
        self._fn = self._matches
        self._set_mesh(mesh)

    def _matches(self, y_true, y_pred):
        y_pred = tf.convert_to_tensor(y_pred)
        labels = _labels_of(tf.convert_to_tensor(y_true), y_pred)
        sharding = self.get_input_sharding(y_pred)
        logits = _at_least_float32(y_pred)
        mine = tf.reduce_max(logits, -1)
        highest = _over_ranks(mine, Max, sharding)
        classes = tf.argmax(logits, -1) + sharding.local_slice.start
        classes = tf.where(mine == highest, classes, sharding.size)
        # Not ==, which loses the static shape where one of them is not known.
        matches = tf.equal(labels, _over_ranks(classes, Min, sharding))
        return tf.cast(matches, self.dtype)


def _labels_of(y_true, logits):
    if len(y_true.shape) == len(logits.shape) and y_true.shape[-1] == 1:
        y_true = tf.squeeze(y_true, -1)
    return tf.cast(y_true, tf.int64)


def _at_least_float32(logits):
    return logits if logits.dtype == tf.float64 else tf.cast(logits, tf.float32)


def _crossentropy(logits, labels, sharding):
    classes = tf.range(
        sharding.local_slice.start, sharding.local_slice.stop, dtype=tf.int64
    )
    is_label = classes == labels[..., None]
    is_class = (labels >= 0) & (labels < sharding.size)

    @tf.custom_gradient
    def crossentropy(logits):
        highest = _over_ranks(tf.reduce_max(logits, -1), Max, sharding)
        shifted = logits - highest[..., None]
        exponentials = tf.exp(shifted)
        # No product: that of 0 with a logit of minus infinity is NaN.
        own = tf.reduce_sum(tf.where(is_label, shifted, tf.zeros_like(shifted)), -1)
        sums = tf.stack([tf.reduce_sum(exponentials, -1), own])
        total, label = tf.unstack(_over_ranks(sums, Sum, sharding))

        def gradient(upstream):
            by_logits = exponentials / total[..., None] - tf.cast(is_label, total.dtype)
            return by_logits * _or_nan(upstream, is_class)[..., None]

        return _or_nan(tf.math.log(total) - label, is_class), gradient

    return tf.cast(crossentropy(_at_least_float32(logits)), logits.dtype)


def _or_nan(values, is_valid):
    return tf.where(is_valid, values, tf.constant(float("nan"), values.dtype))


def _over_ranks(x, op, sharding):
    return transport.combine(x, sharding.process_set, name="Vocabulary", op=op)
