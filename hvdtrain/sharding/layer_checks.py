"""Tensors inside of a model of which each rank has a part.

A divided layer has the attributes `takes_shards` and `gives_shards`: whether its inputs
and its outputs are such parts. Between two of them may stand what computes each element
by itself.
"""

import inspect
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
# Classes of the functions of keras.ops, which are not public.
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
# They act along other axes than the last, which is divided.
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


class _Tensor(NamedTuple):
    """What is known of a tensor; None in its place where nothing is.

    Attributes:
        is_shard: whether each rank has a part, or all have the whole.
        giver: name of the layer that has made it so. No reference to the layer: a
            stage of a pipeline keeps what is known of the outputs.
    """

    is_shard: bool
    giver: str


def check_shards(model):
    """Raises a ValueError if a part of a tensor is taken for the whole, or conversely.

    It follows the tensors of functional and sequential models. What a subclassed model
    or layer makes of a part is not known.

    Args:
        model: a `keras.Model`.
    """
    check_scores(model, outputs_of(model))


def outputs_of(model):
    """Returns what is known of each output of a model: parts, or the whole.

    Raises:
        ValueError: a part inside of it is taken for the whole, or conversely.
    """
    graph = _graph_of(model)
    if graph is None:
        return []
    givers = [_text(tensor._keras_history.operation) for tensor in graph.inputs]
    return _follow(graph, [_Tensor(False, giver) for giver in givers])


def _graph_of(model):
    """Returns a functional model; None for what is neither that nor sequential."""
    graph = getattr(model, "_functional", model)
    is_graph = isinstance(graph, keras.Model) and hasattr(graph, "_nodes_by_depth")
    return graph if is_graph else None


def _follow(graph, inputs):
    """Returns the `_Tensor` of each output of a functional model."""
    known = dict(zip(map(id, graph.inputs), inputs, strict=False))
    for depth in sorted(graph._nodes_by_depth, reverse=True):
        for node in graph._nodes_by_depth[depth]:
            if node.input_tensors:
                given = [known.get(id(tensor)) for tensor in node.input_tensors]
                made = _outputs_of(node.operation, given, len(node.output_tensors))
                known.update(zip(map(id, node.output_tensors), made, strict=False))
    return [known.get(id(tensor)) for tensor in graph.outputs]


def _outputs_of(operation, given, count):
    inner = _graph_of(operation)
    if inner is not None:
        return _follow(inner, given)
    is_wrapper = isinstance(operation, keras.layers.Wrapper)
    return [_output_of(operation.layer if is_wrapper else operation, given)] * count


def _output_of(layer, given):
    parts = [tensor for tensor in given if tensor and tensor.is_shard]
    wholes = [tensor for tensor in given if tensor and not tensor.is_shard]
    is_sharded = hasattr(layer, "takes_shards")
    if parts:
        _check_takes_part(layer, parts[0].giver)
        if wholes and _passes_shards(layer):
            _raise_takes_both(layer, parts[0].giver, wholes[0].giver)
    elif is_sharded and layer.takes_shards and all(given):
        _raise_takes_whole(layer, wholes[0].giver)
    if is_sharded:
        return _Tensor(layer.gives_shards, _text(layer))
    if parts:
        return parts[0] if _passes_shards(layer) else None
    if not _is_keras_own(layer) or not all(given):
        return None
    return _Tensor(False, _text(layer))


def _passes_shards(layer):
    """Whether the output for a part is that part of the output for the whole."""
    if isinstance(layer, _ALONG_OTHER_AXES):
        return getattr(layer, "data_format", "channels_last") == "channels_last"
    if isinstance(layer, _ELEMENTWISE_LAYERS):
        activation = getattr(layer, "activation", None)
        return activation not in NOT_ELEMENTWISE_ACTIVATIONS
    is_layer = isinstance(layer, keras.layers.Layer)
    return not is_layer and type(layer).__name__ in _ELEMENTWISE_OPERATIONS


def _is_keras_own(value):
    # Not by __class__: a divided layer has that of its dense twin.
    kind = value if inspect.isfunction(value) else type(value)
    is_own = kind.__module__.startswith("keras.")
    return is_own and not isinstance(value, keras.layers.Lambda)


def _check_takes_part(layer, giver):
    is_sharded = hasattr(layer, "takes_shards")
    if layer.takes_shards if is_sharded else _passes_shards(layer):
        return
    if not is_sharded and not _is_keras_own(layer):
        return
    raise ValueError(
        f"The {_text(layer)} takes a whole tensor, and each rank has a part of its "
        f"input: the {giver} has gather_output=False. Expected between that and "
        "a RowParallelDense with input_is_parallel=True: elementwise layers, "
        "ParallelDropout, or layers of your own. Pass gather_output=True, or move the "
        "layer."
    )


def _raise_takes_whole(layer, giver):
    raise ValueError(
        f"The {_text(layer)} takes this rank's part of a tensor, and its input is the "
        f"whole output of the {giver}. Give that gather_output=False, if it is "
        "a ColumnParallelDense, or use the layer for whole inputs: "
        "input_is_parallel=False, or Dropout for ParallelDropout."
    )


def _raise_takes_both(layer, part_giver, whole_giver):
    raise ValueError(
        f"The {_text(layer)} combines this rank's part of the output of the "
        f"{part_giver} with the whole output of the {whole_giver}, whose "
        "gradient would lack the shares of the other ranks. Combine them after the "
        "RowParallelDense, or in a layer of your own that passes the whole tensor "
        "through parallel.mappings.copy."
    )


def check_scores(model, outputs):
    """Raises a ValueError if a loss or metric of Keras would be that of a part.

    Args:
        model: a `keras.Model`, compiled or not.
        outputs: what `outputs_of` returns of it, or of the model whose outputs it has.
    """
    givers = [output.giver for output in outputs if output and output.is_shard]
    losses = keras.tree.flatten(getattr(model, "loss", None))
    scores = losses
    if len(outputs) == 1:
        metrics = getattr(model, "_compile_metrics", None)
        scores = losses + keras.tree.flatten(getattr(metrics, "_user_metrics", None))
    elif len(losses) == len(outputs):
        pairs = zip(losses, outputs, strict=True)
        scores = [loss for loss, output in pairs if output and output.is_shard]
    for each in scores if givers else ():
        if isinstance(each, str) or _is_keras_own(each):
            raise ValueError(
                f"The model returns this rank's part of the output of the "
                f"{givers[0]}, and a loss or metric of Keras takes the whole. "
                f"Received: {each!r}. Pass gather_output=True, or "
                "parallel.ParallelSparseCategoricalCrossentropy(from_logits=True) and "
                "ParallelSparseCategoricalAccuracy."
            )


def _text(layer):
    return f"{type(layer).__name__} {layer.name!r}"
