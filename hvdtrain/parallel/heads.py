"""What attention layers whose heads are divided among ranks have in common."""

import types

import keras
import tensorflow as tf
from keras import ops
from keras.src.backend import get_keras_mask, set_keras_mask

from hvdtrain.parallel import mappings
from hvdtrain.parallel.divided_weights import (
    DividedWeights,
    SumRegularizer,
    check_arguments,
)
from hvdtrain.parallel.dropout import dropout
from hvdtrain.parallel.model_group import InModelGroup


class DividedHeads(InModelGroup):
    """Mixin of an attention layer of Keras; it makes the sublayers of `build`.

    Subclasses set `_all_heads`, the number of query heads of the dense twin, and
    `_attention_rank`, the number of axes along which there is attention.
    """

    _attention_rank = 1

    def _check(self, prefix=""):
        constraints = ("kernel_constraint", "bias_constraint")
        kinds = ("kernel", "bias", "activity")
        regularizers = [f"{kind}_regularizer" for kind in kinds]
        check_arguments(
            self,
            refused={name: getattr(self, prefix + name) for name in constraints},
            additive={name: getattr(self, prefix + name) for name in regularizers},
        )

    def _to_heads(self, shape, heads, width, name, use_bias, activation=None):
        options = self._get_common_kwargs_for_sublayer()
        partition = self.partition(len(shape) - 1, heads)
        if regularizer := options["activity_regularizer"]:
            options["activity_regularizer"] = SumRegularizer(regularizer, partition)
        projection = _ToHeads(
            "...d,dnh->...nh",
            output_shape=(heads, width),
            bias_axes="nh" if use_bias else None,
            activation=activation,
            name=name,
            model_axis=self._model_axis,
            **options,
        )
        projection.build(shape)
        return projection

    def _from_heads(self, shape, outputs, use_bias):
        axes = "abcdefgijklm"[: len(outputs)]
        projection = _FromHeads(
            f"...nh,nh{axes}->...{axes}",
            output_shape=outputs,
            bias_axes=axes if use_bias else None,
            name="attention_output",
            model_axis=self._model_axis,
            **self._get_common_kwargs_for_sublayer(),
        )
        projection.build(shape)
        return projection

    def _dropout_of_scores(self, rate, rank):
        return _DropoutOfHeads(
            rate,
            heads=self._heads_of_scores(rank),
            dtype=self.dtype_policy,
            seed=self.seed,
        )

    def _heads_of_scores(self, rank):
        # Scores are (..., heads, query positions, key positions).
        return self.partition(rank - 2 * self._attention_rank - 1, self._all_heads)

    def call(
        self,
        query,
        value,
        key=None,
        query_mask=None,
        value_mask=None,
        key_mask=None,
        attention_mask=None,
        return_attention_scores=False,
        training=None,
        use_causal_mask=False,
    ):
        """Return the outputs on all ranks, and the scores of all heads if asked for."""
        key = value if key is None else key
        # One tensor in two places has one gradient, and one allreduce of it.
        inputs = {id(x): x for x in (query, value, key)}
        copies = {i: self._copy(x) for i, x in inputs.items()}
        rank_of_scores = len(query.shape) + self._attention_rank
        outputs = super().call(
            copies[id(query)],
            copies[id(value)],
            copies[id(key)],
            query_mask=query_mask,
            value_mask=value_mask,
            key_mask=key_mask,
            attention_mask=self._of_own_heads(attention_mask, rank_of_scores),
            return_attention_scores=return_attention_scores,
            training=training,
            use_causal_mask=use_causal_mask,
        )
        # Keras removes the masks of some layers' inputs.
        for i, x in inputs.items():
            set_keras_mask(x, get_keras_mask(copies[i]))
        if not return_attention_scores:
            return outputs
        outputs, scores = outputs
        heads = self._heads_of_scores(len(scores.shape))
        return outputs, mappings.gather(scores, heads)

    def _of_own_heads(self, mask: tf.Tensor | None, rank: int) -> tf.Tensor | None:
        """Return the part of a mask for this rank's heads, if it has an axis of heads.

        Raises:
            ValueError: on all ranks, for another number of heads.
        """
        if mask is None or len(mask.shape) < rank:
            return mask
        heads = self._heads_of_scores(rank)
        size = mask.shape[heads.axis]
        if size not in (None, 1, heads.size):
            raise ValueError(
                f"attention_mask is for another number of heads. Received: {size}, in "
                f"the shape {tuple(mask.shape)}; expected {heads.size} or 1."
            )
        return mask if size == 1 else heads.of(mask)

    def _copy(self, x):
        copied = mappings.copy(x, self.partition(-1, self._all_heads))
        set_keras_mask(copied, get_keras_mask(x))
        return copied


class _Projection(DividedWeights, keras.layers.EinsumDense):
    def __init__(self, *args, model_axis, **kwargs):
        super().__init__(*args, **kwargs)
        self._model_axis = model_axis


class _ToHeads(_Projection):
    """Outputs of this rank's heads from the copy of a replicated tensor."""

    divided_axes = types.MappingProxyType({"kernel": 1, "bias": 0})


class _FromHeads(_Projection):
    """Outputs on all ranks from those of their heads."""

    divided_axes = types.MappingProxyType({"kernel": 0})

    def call(self, inputs, training=None):
        x = ops.einsum(self.equation, inputs, self.kernel)
        x = mappings.reduce(x, self.partition(0, inputs.shape[-2]))
        return x if self.bias is None else ops.add(x, self.bias)


class _DropoutOfHeads(keras.layers.Dropout):
    """Dropout of the attention weights of this rank's heads."""

    def __init__(self, *args, heads, **kwargs):
        super().__init__(*args, **kwargs)
        self._heads = heads

    def call(self, inputs, training=False):
        if not training or not 0 < self.rate < 1:
            return super().call(inputs, training=training)
        return dropout(self, inputs, self._heads)
