"""Check that no layer takes the shard of a tensor for the full tensor, or conversely.

Inside of a model group, an output with `gather_output=False` is a shard: each rank has
some features. A layer that normalizes, mixes or drops features needs the full tensor,
and would compute wrong numbers from a shard without an error. Sharded layers have the
attributes `takes_shards` and `gives_shards`, which say whether their inputs and outputs
are shards. Between two of them, elementwise layers and operations are allowed:

    ColumnParallelDense(gather_output=False)        gives shards
    Activation("relu")                              elementwise
    RowParallelDense(input_is_parallel=True)        takes shards

The checks follow the tensors of functional and sequential models. They cannot see what
a subclassed model or a user's own layer does with a shard, and allow it.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras

_ELEMENTWISE_LAYERS = (
    keras.layers.Activation,
    keras.layers.Add,
    keras.layers.Average,
    keras.layers.ELU,
    keras.layers.Identity,
    keras.layers.LeakyReLU,
    keras.layers.Maximum,
    keras.layers.Minimum,
    keras.layers.Multiply,
    keras.layers.ReLU,
    keras.layers.Rescaling,
    keras.layers.Subtract,
)
# Names of the classes behind keras.ops; the classes are not public.
_ELEMENTWISE_OPERATIONS = {
    *("Abs", "Absolute", "Add", "Cast", "Ceil", "Celu", "Clip", "Copy", "Cos", "Cosh"),
    *("Divide", "DivideNoNan", "Elu", "Equal", "Erf", "Erfc", "Exp", "Exp2", "Expm1"),
    *("Floor", "FloorDivide", "Gelu", "Greater", "GreaterEqual", "HardShrink"),
    *("HardSigmoid", "HardSilu", "HardTanh", "Isfinite", "Isinf", "Isnan", "LeakyRelu"),
    *("Less", "LessEqual", "Log", "Log10", "Log1p", "Log2", "LogSigmoid", "Logaddexp"),
    *("LogicalAnd", "LogicalNot", "LogicalOr", "Maximum", "Minimum", "Mod", "Multiply"),
    *("NanToNum", "Negative", "NotEqual", "OnesLike", "Power", "ReLU", "Reciprocal"),
    *("Relu", "Relu6", "Round", "Rsqrt", "Selu", "Sigmoid", "Sign", "Silu", "Sin"),
    *("Sinh", "SoftShrink", "Softplus", "Softsign", "SparsePlus", "SparseSigmoid"),
    *("Sqrt", "Square", "Squareplus", "StopGradient", "Subtract", "Tan", "Tanh"),
    *("TanhShrink", "Threshold", "TrueDivide", "Where", "ZerosLike"),
}
# Layers that act along other axes than the last one, which is sharded.
_ALONG_OTHER_AXES = (
    keras.layers.GlobalAveragePooling1D,
    keras.layers.GlobalAveragePooling2D,
    keras.layers.GlobalMaxPooling1D,
    keras.layers.GlobalMaxPooling2D,
    keras.layers.RepeatVector,
)
NOT_ELEMENTWISE_ACTIVATIONS = (
    keras.activations.glu,
    keras.activations.log_softmax,
    keras.activations.softmax,
    keras.activations.sparsemax,
)


class _Output(NamedTuple):
    """What is known of the output of a layer; None in its place if nothing is known.

    Attributes:
        is_shard: whether each rank has a shard of the tensor; otherwise all have it in
            full.
        source: name of the layer or input that computes it. Not the layer itself: a
            stage of a pipeline keeps these objects, and would keep all layers alive.
    """

    is_shard: bool
    source: str


def check_shards(model: keras.Model) -> None:
    """Raise a ValueError if a shard is taken for a full tensor, or conversely.

    Losses and metrics of the model are checked as well.
    """
    check_scores(model, trace_outputs(model))


def trace_outputs(model: keras.Model) -> list[_Output | None]:
    """Return what is known of each output of a model.

    Raises:
        ValueError: a layer of the model takes a shard for a full tensor, or conversely.
    """
    graph = _as_graph(model)
    if graph is None:
        return []
    sources = [_describe(tensor._keras_history.operation) for tensor in graph.inputs]
    return _trace(graph, [_Output(False, source) for source in sources])


def _as_graph(model: keras.Model | keras.Operation) -> keras.Model | None:
    """Return a functional model; None for an operation without a graph of layers."""
    graph = getattr(model, "_functional", model)
    is_graph = isinstance(graph, keras.Model) and hasattr(graph, "_nodes_by_depth")
    return graph if is_graph else None


def _trace(
    graph: keras.Model, inputs: Sequence[_Output | None]
) -> list[_Output | None]:
    known = dict(zip(map(id, graph.inputs), inputs, strict=False))
    for depth in sorted(graph._nodes_by_depth, reverse=True):
        for node in graph._nodes_by_depth[depth]:
            if node.input_tensors:
                taken = [known.get(id(tensor)) for tensor in node.input_tensors]
                given = _trace_node(node.operation, taken, len(node.output_tensors))
                known.update(zip(map(id, node.output_tensors), given, strict=False))
    return [known.get(id(tensor)) for tensor in graph.outputs]


def _trace_node(
    operation: keras.Operation, inputs: Sequence[_Output | None], count: int
) -> list[_Output | None]:
    graph = _as_graph(operation)
    if graph is not None:
        return _trace(graph, inputs)
    is_wrapper = isinstance(operation, keras.layers.Wrapper)
    return [_trace_layer(operation.layer if is_wrapper else operation, inputs)] * count


def _trace_layer(
    layer: keras.Operation, inputs: Sequence[_Output | None]
) -> _Output | None:
    shards = [tensor for tensor in inputs if tensor and tensor.is_shard]
    full = [tensor for tensor in inputs if tensor and not tensor.is_shard]
    is_parallel = hasattr(layer, "takes_shards")
    if shards:
        _check_takes_shard(layer, shards[0].source)
        if full and _keeps_shards(layer):
            _raise_takes_both(layer, shards[0].source, full[0].source)
    elif is_parallel and layer.takes_shards and all(inputs):
        _raise_takes_full(layer, full[0].source)
    if is_parallel:
        return _Output(layer.gives_shards, _describe(layer))
    if shards:
        return shards[0] if _keeps_shards(layer) else None
    if not _is_from_keras(layer) or not all(inputs):
        return None
    return _Output(False, _describe(layer))


def _keeps_shards(layer: keras.Operation) -> bool:
    """Return whether the output for a shard is the shard of the full output."""
    if isinstance(layer, _ALONG_OTHER_AXES):
        return getattr(layer, "data_format", "channels_last") == "channels_last"
    if isinstance(layer, _ELEMENTWISE_LAYERS):
        activation = getattr(layer, "activation", None)
        return activation not in NOT_ELEMENTWISE_ACTIVATIONS
    is_layer = isinstance(layer, keras.layers.Layer)
    return not is_layer and type(layer).__name__ in _ELEMENTWISE_OPERATIONS


def _is_from_keras(value: keras.Operation | Callable) -> bool:
    # type() and not __class__, which for a sharded layer is the Keras layer.
    cls = value if inspect.isfunction(value) else type(value)
    return cls.__module__.startswith("keras.") and not isinstance(
        value, keras.layers.Lambda
    )


def _check_takes_shard(layer: keras.Operation, source: str) -> None:
    is_parallel = hasattr(layer, "takes_shards")
    if layer.takes_shards if is_parallel else _keeps_shards(layer):
        return
    if not is_parallel and not _is_from_keras(layer):
        return
    raise ValueError(
        f"The {_describe(layer)} takes a full tensor, and each rank has a shard of its "
        f"input: the {source} has gather_output=False. Allowed between this layer and "
        "a RowParallelDense with input_is_parallel=True: elementwise layers, "
        "ParallelDropout, and layers of your own. Pass gather_output=True, or move "
        f"the {type(layer).__name__}."
    )


def _raise_takes_full(layer: keras.Operation, source: str) -> None:
    raise ValueError(
        f"The {_describe(layer)} takes this rank's shard of a tensor, and its input is "
        f"the full output of the {source}. Pass gather_output=False to that layer, if "
        "it is a ColumnParallelDense. Otherwise pass input_is_parallel=False, or use "
        "Dropout for ParallelDropout."
    )


def _raise_takes_both(
    layer: keras.Operation, shard_source: str, full_source: str
) -> None:
    raise ValueError(
        f"The {_describe(layer)} combines this rank's shard of the output of the "
        f"{shard_source} with the full output of the {full_source}, whose gradient "
        "would lack the terms of the other ranks. Combine them after the "
        "RowParallelDense, or in a layer of your own that passes the full tensor "
        "through parallel.mappings.copy."
    )


def check_scores(model: keras.Model, outputs: Sequence[_Output | None]) -> None:
    """Raise a ValueError if a loss or metric of Keras would be computed from a shard.

    Args:
        model: a model, compiled or not.
        outputs: what `trace_outputs` returns for it. A pipeline passes the outputs of
            the full model, which its stages together compute.
    """
    sources = [output.source for output in outputs if output and output.is_shard]
    losses = keras.tree.flatten(getattr(model, "loss", None))
    scores = losses
    if len(outputs) == 1:
        metrics = getattr(model, "_compile_metrics", None)
        scores = losses + keras.tree.flatten(getattr(metrics, "_user_metrics", None))
    elif len(losses) == len(outputs):
        pairs = zip(losses, outputs, strict=True)
        scores = [loss for loss, output in pairs if output and output.is_shard]
    for score in scores if sources else ():
        if isinstance(score, str) or _is_from_keras(score):
            raise ValueError(
                f"The model returns this rank's shard of the output of the "
                f"{sources[0]}, and a loss or metric of Keras takes the full output. "
                f"Received: {score!r}. Pass gather_output=True, or "
                "parallel.ParallelSparseCategoricalCrossentropy(from_logits=True) and "
                "ParallelSparseCategoricalAccuracy."
            )


def _describe(layer: keras.Operation) -> str:
    return f"{type(layer).__name__} {layer.name!r}"
