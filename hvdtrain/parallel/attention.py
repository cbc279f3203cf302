"""Multi-head attention whose heads are divided among the ranks of a model group."""

import types

import keras
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


class ParallelMultiHeadAttention(InModelGroup, keras.layers.MultiHeadAttention):
    """`keras.layers.MultiHeadAttention` of which each rank computes some heads.

    The projections of query, key and value are divided by columns and the projection of
    the output by rows, as in Megatron (Shoeybi et al. 2019, arXiv:1909.08053):

        Y = sum over ranks r, heads h of r (softmax(Q_h K_h^T / sqrt(d)) V_h O_h) + b

    Forward one allreduce of the output crosses the ranks, backward one of the gradient
    of each of query, value and key that is another tensor. The first ranks have one
    head more where the number of heads is not divisible. Each rank draws the dropout of
    all attention weights and takes that of its heads, see `ParallelDropout`.

    Args:
        num_heads: as for `keras.layers.MultiHeadAttention`, of the dense twin; at least
            one for each rank of the model group.
        key_dim: as for `keras.layers.MultiHeadAttention`.
        mesh: the `Mesh`; by default the active one.
        **kwargs: as for `keras.layers.MultiHeadAttention`.

    Raises:
        ValueError: for fewer heads than ranks, for constraints, and for regularizers
            other than L1 and L2.
    """

    def __init__(self, num_heads, key_dim, *args, mesh=None, **kwargs):
        super().__init__(num_heads, key_dim, *args, **kwargs)
        self._set_mesh(mesh)
        if num_heads < self._model_axis.size:
            raise ValueError(
                f"ParallelMultiHeadAttention needs a head on each of the "
                f"{self._model_axis.size} ranks of the model group. Received: "
                f"num_heads={num_heads}."
            )
        check_arguments(
            self,
            refused={
                "kernel_constraint": self._kernel_constraint,
                "bias_constraint": self._bias_constraint,
            },
            additive={
                "kernel_regularizer": self._kernel_regularizer,
                "bias_regularizer": self._bias_regularizer,
                "activity_regularizer": self._activity_regularizer,
            },
        )

    def build(self, query_shape, value_shape, key_shape=None):
        """Make the weights; their initial values are those of the dense twin."""
        key_shape = value_shape if key_shape is None else key_shape
        if value_shape[1:-1] != key_shape[1:-1]:
            raise ValueError(
                "The shapes of value and key must be equal but for the last axis. "
                f"Received: value_shape={value_shape}, key_shape={key_shape}"
            )
        # In the order of the dense twin: each of them draws seeds.
        self._query_dense = self._heads_of(query_shape, "query", self._key_dim)
        self._key_dense = self._heads_of(key_shape, "key", self._key_dim)
        if getattr(self, "_use_gate", False):
            self._gate_dense = self._heads_of(
                query_shape, "gate", self._value_dim, activation="sigmoid"
            )
        self._value_dense = self._heads_of(value_shape, "value", self._value_dim)
        self._build_attention(len(value_shape) + 1)
        self._output_dense = self._output_of(query_shape)

    def _heads_of(self, shape, name, width, **kwargs):
        options = self._get_common_kwargs_for_sublayer()
        heads = self.partition(len(shape) - 1, self._num_heads)
        if regularizer := options["activity_regularizer"]:
            options["activity_regularizer"] = SumRegularizer(regularizer, heads)
        projection = _ToHeads(
            "...d,dnh->...nh",
            output_shape=(self._num_heads, width),
            bias_axes="nh" if self._use_bias else None,
            name=name,
            model_axis=self._model_axis,
            **options,
            **kwargs,
        )
        projection.build(shape)
        return projection

    def _output_of(self, query_shape):
        outputs = tuple(self._output_shape or query_shape[-1:])
        axes = "abcdefgijklm"[: len(outputs)]
        projection = _FromHeads(
            f"...nh,nh{axes}->...{axes}",
            output_shape=outputs,
            bias_axes=axes if self._use_bias else None,
            name="attention_output",
            model_axis=self._model_axis,
            **self._get_common_kwargs_for_sublayer(),
        )
        projection.build((*query_shape[:-1], self._num_heads, self._value_dim))
        return projection

    def _build_attention(self, rank):
        # Without a seed for the dropout layer of Keras, which is replaced.
        rate, self._dropout = self._dropout, 0.0
        super()._build_attention(rank)
        self._dropout = rate
        self._dropout_layer = _DropoutOfHeads(
            rate,
            dtype=self.dtype_policy,
            seed=self.seed,
            heads=self._heads_of_scores(rank + len(self._attention_axes) - 1),
        )

    def _heads_of_scores(self, rank):
        # The scores are (..., heads, query positions, key positions).
        return self.partition(rank - 2 * len(self._attention_axes) - 1, self._num_heads)

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
        outputs = super().call(
            copies[id(query)],
            copies[id(value)],
            copies[id(key)],
            query_mask=query_mask,
            value_mask=value_mask,
            key_mask=key_mask,
            attention_mask=attention_mask,
            return_attention_scores=return_attention_scores,
            training=training,
            use_causal_mask=use_causal_mask,
        )
        if not return_attention_scores:
            return outputs
        outputs, scores = outputs
        heads = self._heads_of_scores(len(scores.shape))
        return outputs, mappings.gather(scores, heads)

    def _copy(self, x):
        # Keras reads the mask of the query here, and removes those of the inputs.
        mask = get_keras_mask(x)
        set_keras_mask(x, None)
        x = mappings.copy(x, self.partition(-1, self._num_heads))
        set_keras_mask(x, mask)
        return x


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
