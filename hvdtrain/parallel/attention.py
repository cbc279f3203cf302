"""Attention layers whose heads are sharded over a model group.

The projections of query, key and value are sharded by columns and the projection of the
output by rows, as in Megatron (Shoeybi et al. 2019, arXiv:1909.08053):

    Y = sum over ranks r, heads h of r (softmax(Q_h K_h^T / sqrt(d)) V_h O_h) + b

The forward pass has one allreduce, of the output. The backward pass has one for each of
query, value and key that is a tensor of its own, of its gradient. Scores that are
returned are gathered. With dropout, each rank draws the mask of all heads and takes the
shard of its heads; see `ParallelDropout`.
"""

import types
from typing import Any

import keras
import tensorflow as tf
from keras import ops
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask

from hvdtrain.parallel import mappings
from hvdtrain.parallel.dropout import dropout
from hvdtrain.parallel.layer import (
    InModelGroup,
    ShardedWeights,
    SumRegularizer,
    check_arguments,
)
from hvdtrain.parallel.mesh import Axes, Axis, Mesh
from hvdtrain.sharding.shards import Shape, Sharding

# Labels of the axes before the projected ones. With an ellipsis in their place,
# TensorFlow computes the gradient of a kernel by position, and adds up the products.
_BATCH_LABELS = "opqrstuvwxyz"


class ShardedHeads(InModelGroup):
    """Mixin of an attention layer of Keras with sharded projections."""

    # Query heads of all ranks together.
    _all_heads: int

    @property
    def _attention_rank(self) -> int:
        """The number of axes over which there is attention."""
        return 1

    def _check_arguments(self, prefix: str = "") -> None:
        constraints = ("kernel_constraint", "bias_constraint")
        regularizers = [f"{x}_regularizer" for x in ("kernel", "bias", "activity")]
        check_arguments(
            self,
            refused={name: getattr(self, prefix + name) for name in constraints},
            additive={name: getattr(self, prefix + name) for name in regularizers},
        )

    def _build_input_projection(
        self,
        shape: Shape,
        heads: int,
        width: int,
        name: str,
        use_bias: bool,
        activation: str | None = None,
    ) -> "_ToHeads":
        options = self._get_common_kwargs_for_sublayer()
        sharding = self.make_sharding(len(shape) - 1, heads)
        if regularizer := options["activity_regularizer"]:
            options["activity_regularizer"] = SumRegularizer(regularizer, sharding)
        batch = _BATCH_LABELS[: len(shape) - 1]
        projection = _ToHeads(
            f"{batch}d,dnh->{batch}nh",
            output_shape=(*[None] * (len(shape) - 2), heads, width),
            bias_axes="nh" if use_bias else None,
            activation=activation,
            name=name,
            model_axis=self._model_axis,
            **options,
        )
        projection.build(shape)
        return projection

    def _build_output_projection(
        self, shape: Shape, outputs: Shape, use_bias: bool
    ) -> "_FromHeads":
        axes, batch = "abcdefgijklm"[: len(outputs)], _BATCH_LABELS[: len(shape) - 2]
        projection = _FromHeads(
            f"{batch}nh,nh{axes}->{batch}{axes}",
            output_shape=(*[None] * (len(shape) - 3), *outputs),
            bias_axes=axes if use_bias else None,
            name="attention_output",
            model_axis=self._model_axis,
            **self._get_common_kwargs_for_sublayer(),
        )
        projection.build(shape)
        return projection

    def _make_dropout(self, rate: float, rank: int) -> "_DropoutOfHeads":
        return _DropoutOfHeads(
            rate,
            heads=self._make_heads_sharding(rank),
            dtype=self.dtype_policy,
            seed=self.seed,
        )

    def _make_heads_sharding(self, rank: int) -> Sharding:
        # The axes of scores are (..., heads, query positions, key positions).
        return self.make_sharding(rank - 2 * self._attention_rank - 1, self._all_heads)

    def call(
        self,
        query: tf.Tensor,
        value: tf.Tensor,
        key: tf.Tensor | None = None,
        query_mask: tf.Tensor | None = None,
        value_mask: tf.Tensor | None = None,
        key_mask: tf.Tensor | None = None,
        attention_mask: tf.Tensor | None = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
        use_causal_mask: bool = False,
    ) -> tf.Tensor | tuple[tf.Tensor, tf.Tensor]:
        key = value if key is None else key
        # Each tensor once: self-attention passes one tensor three times, and three
        # copies would need three allreduces of their gradients.
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
            attention_mask=self._shard_mask(attention_mask, rank_of_scores),
            return_attention_scores=return_attention_scores,
            training=training,
            use_causal_mask=use_causal_mask,
        )
        # Keras clears the masks of some layers' inputs: clear the originals' as well.
        for i, x in inputs.items():
            set_keras_mask(x, get_keras_mask(copies[i]))
        if not return_attention_scores:
            return outputs
        outputs, scores = outputs
        heads = self._make_heads_sharding(len(scores.shape))
        return outputs, mappings.gather(scores, heads)

    def _shard_mask(self, mask: tf.Tensor | None, rank: int) -> tf.Tensor | None:
        """Return the mask for this rank's heads; itself if it has no axis of heads."""
        if mask is None or len(mask.shape) < rank:
            return mask
        heads = self._make_heads_sharding(rank)
        size = mask.shape[heads.axis]
        if size not in (None, 1, heads.size):
            raise ValueError(
                f"attention_mask is for another number of heads. Received: {size}, in "
                f"the shape {tuple(mask.shape)}; expected {heads.size} or 1."
            )
        return mask if size == 1 else heads.shard(mask)

    def _copy(self, x: tf.Tensor) -> tf.Tensor:
        copied = mappings.copy(x, self.make_sharding(-1, self._all_heads))
        set_keras_mask(copied, get_keras_mask(x))
        return copied


class _Projection(ShardedWeights, keras.layers.EinsumDense):
    def __init__(self, *args: Any, model_axis: Axis, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._model_axis = model_axis


class _ToHeads(_Projection):
    """Projects a replicated tensor to this rank's heads."""

    sharded_axes = types.MappingProxyType({"kernel": 1, "bias": 0})


class _FromHeads(_Projection):
    """Projects the ranks' heads to an output that is replicated."""

    sharded_axes = types.MappingProxyType({"kernel": 0})

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        x = ops.einsum(self.equation, inputs, self.kernel)
        x = mappings.reduce(x, self.make_sharding(0, inputs.shape[-2]))
        return x if self.bias is None else ops.add(x, self.bias)


class _DropoutOfHeads(keras.layers.Dropout):
    """Dropout of the attention weights of this rank's heads."""

    def __init__(self, *args: Any, heads: Sharding, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._heads = heads

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        if not training or not 0 < self.rate < 1:
            return super().call(inputs, training=training)
        return dropout(self, inputs, self._heads)


class ParallelMultiHeadAttention(ShardedHeads, keras.layers.MultiHeadAttention):
    """`keras.layers.MultiHeadAttention` whose heads are sharded over a model group.

    The first ranks have one head more where the number of heads is not divisible.

    Args:
        num_heads: heads of all ranks together; at least one for each rank.
        mesh: the `Mesh`; by default the active one.
        others: as for `keras.layers.MultiHeadAttention`.

    Raises:
        ValueError: for fewer heads than ranks, for constraints, and for regularizers
            other than L1 and L2.
    """

    _dropout: float

    def __init__(
        self,
        num_heads: int,
        key_dim: int,
        *args: Any,
        mesh: Mesh | Axes | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_heads, key_dim, *args, **kwargs)
        self._set_mesh(mesh)
        self._all_heads = num_heads
        if num_heads < self._model_axis.size:
            raise ValueError(
                "ParallelMultiHeadAttention needs a head on each of the "
                f"{self._model_axis.size} ranks of the model group. Received: "
                f"num_heads={num_heads}."
            )
        self._check_arguments(prefix="_")

    @property
    def _attention_rank(self) -> int:
        return len(self._attention_axes)

    def build(
        self, query_shape: Shape, value_shape: Shape, key_shape: Shape | None = None
    ) -> None:
        key_shape = _check_key_shape(value_shape, key_shape)
        # In the order of the Keras layer: each projection draws seeds, and another
        # order would give other initial values.
        self._query_dense = self._project(query_shape, self._key_dim, "query")
        self._key_dense = self._project(key_shape, self._key_dim, "key")
        if getattr(self, "_use_gate", False):
            self._gate_dense = self._project(
                query_shape, self._value_dim, "gate", activation="sigmoid"
            )
        self._value_dense = self._project(value_shape, self._value_dim, "value")
        self._build_attention(len(value_shape) + 1)
        self._output_dense = self._build_output_projection(
            (*query_shape[:-1], self._num_heads, self._value_dim),
            outputs=tuple(self._output_shape or query_shape[-1:]),
            use_bias=self._use_bias,
        )

    def _project(self, shape: Shape, width: int, name: str, **kwargs: Any) -> _ToHeads:
        return self._build_input_projection(
            shape, self._num_heads, width, name, self._use_bias, **kwargs
        )

    def _build_attention(self, rank: int) -> None:
        # At rate 0, Keras makes no dropout layer of its own, which would draw a seed.
        rate, self._dropout = self._dropout, 0.0
        super()._build_attention(rank)
        self._dropout = rate
        rank_of_scores = rank - 1 + self._attention_rank
        self._dropout_layer = self._make_dropout(rate, rank_of_scores)


class ParallelGroupQueryAttention(ShardedHeads, keras.layers.GroupQueryAttention):
    """`keras.layers.GroupQueryAttention` whose heads are sharded over a model group.

    Args:
        num_query_heads: query heads of all ranks together.
        num_key_value_heads: key and value heads of all ranks together; a multiple of
            the ranks of the group, so that each rank has the query heads of its own key
            and value heads.
        mesh: the `Mesh`; by default the active one.
        others: as for `keras.layers.GroupQueryAttention`.

    Raises:
        ValueError: if the ranks would have different numbers of key and value heads,
            for constraints, and for regularizers other than L1 and L2.
    """

    def __init__(
        self,
        head_dim: int,
        num_query_heads: int,
        num_key_value_heads: int,
        *args: Any,
        mesh: Mesh | Axes | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            head_dim, num_query_heads, num_key_value_heads, *args, **kwargs
        )
        self._set_mesh(mesh)
        self._all_heads = num_query_heads
        if num_key_value_heads % self._model_axis.size:
            raise ValueError(
                "ParallelGroupQueryAttention needs a multiple of the "
                f"{self._model_axis.size} ranks of the model group. Received: "
                f"num_key_value_heads={num_key_value_heads}."
            )
        self._check_arguments()

    def build(
        self, query_shape: Shape, value_shape: Shape, key_shape: Shape | None = None
    ) -> None:
        key_shape = _check_key_shape(value_shape, key_shape)
        queries, keys = self.num_query_heads, self.num_key_value_heads
        self.feature_dim = query_shape[-1]
        # In the order of the Keras layer: each projection draws seeds.
        self._query_dense = self._project(query_shape, queries, "query")
        self._key_dense = self._project(key_shape, keys, "key")
        if getattr(self, "use_gate", False):
            self._gate_dense = self._project(
                query_shape, queries, "gate", activation="sigmoid"
            )
        self._value_dense = self._project(value_shape, keys, "value")
        self._softmax = keras.layers.Softmax(axis=-1, dtype=self.dtype_policy)
        self._dropout_layer = self._make_dropout(self.dropout, rank=4)
        # Batch b, query q, key k, head u, width h; scores are (b, u, q, k).
        self._dot_product_equation = "bquh,bkuh->buqk"
        self._combine_equation = "buqk,bkuh->bquh"
        self._output_dense = self._build_output_projection(
            (*query_shape[:-1], queries, self.head_dim),
            outputs=(self.feature_dim,),
            use_bias=self.use_bias,
        )

    def _project(self, shape: Shape, heads: int, name: str, **kwargs: Any) -> _ToHeads:
        return self._build_input_projection(
            shape, heads, self.head_dim, name, self.use_bias, **kwargs
        )


def _check_key_shape(value_shape: Shape, key_shape: Shape | None) -> Shape:
    key_shape = value_shape if key_shape is None else key_shape
    if value_shape[1:-1] != key_shape[1:-1]:
        raise ValueError(
            "The shapes of value and key must be equal but for the last axis. "
            f"Received: value_shape={value_shape}, key_shape={key_shape}"
        )
    return key_shape
