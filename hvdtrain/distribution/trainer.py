"""What methods of Keras do under an active distribution, on several ranks.

They compute what one process computes with the global batch. Each function takes the
method of Keras, the object, and the arguments of the method.
"""

import inspect
import warnings
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.collectives import transport
from hvdtrain.collectives.process_sets import global_process_set
from hvdtrain.collectives.transport import Reduction, Sum
from hvdtrain.distribution import devices
from hvdtrain.distribution.devices import Method
from hvdtrain.distribution.model_parallel import prepare
from hvdtrain.job.world import JobError
from hvdtrain.keras.callbacks.broadcast import BroadcastGlobalVariablesCallback
from hvdtrain.keras.callbacks.joining import JoinCallback
from hvdtrain.keras.hook import ReductionHook
from hvdtrain.keras.layers import SyncBatchNormalization, moments_over_ranks
from hvdtrain.keras.loss_reductions import find_mismatch
from hvdtrain.keras.metrics import (
    Share,
    addends,
    combined,
    metric_variables,
    warn_of_states,
)
from hvdtrain.keras.moving_statistics import AverageMovingStatisticsCallback
from hvdtrain.keras.optimizer import DistributedOptimizer
from hvdtrain.keras.replication import get_hook
from hvdtrain.parallel.mesh import Mesh

_UNEVEN = (
    "Received a global batch whose number of samples {size} ranks do not divide. "
    "Pass drop_remainder=True to dataset.batch, and a batch size that is divisible."
)


def compile_distributed(
    method: Method,
    model: keras.Model,
    optimizer: Any = "rmsprop",
    loss: Any = None,
    loss_weights: Any = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Compile with a distributed optimizer, and without XLA."""
    if kwargs.get("jit_compile") is True:
        if global_process_set.rank() == 0:
            warnings.warn(
                "XLA is disabled under keras.distribution: it cannot compile the "
                "collectives of the steps. Pass jit_compile=False to silence this "
                "warning.",
                stacklevel=3,
            )
        kwargs["jit_compile"] = False
    method(model, optimizer, loss, loss_weights, *args, **kwargs)
    # Keras enables it on GPUs.
    model.jit_compile = False
    if model.built:
        prepare(model)
    if model.optimizer is None:
        return
    found = devices.active_mesh()
    mesh = found if isinstance(found, Mesh) else None
    if get_hook(model.optimizer) is None:
        DistributedOptimizer(model.optimizer, mesh=mesh)
    hook = get_hook(model.optimizer)
    assert hook
    if devices.has_ranks():
        _check_ranks(hook, mesh)
    if devices.has_data_ranks():
        _check_losses(loss, loss_weights, hook.reducer.options.reduction)
    # Gradients of tables are dense, as on JAX.
    hook.reducer.reduce_densely()


def _check_ranks(hook: ReductionHook, mesh: Mesh | None) -> None:
    """Raise a JobError for an optimizer of the user that is over other ranks."""
    if mesh and not (hook.mesh and hook.mesh.shape == mesh.shape):
        raise JobError(
            "Received an optimizer that is distributed, and not over the mesh of "
            "keras.distribution.ModelParallel; expected a new Keras optimizer, which "
            "compile distributes over it."
        )
    ranks, expected = hook.reducer.process_set.ranks, devices.data_axis().process_set
    if list(ranks) != list(expected.ranks):
        raise JobError(
            f"Received an optimizer that is distributed over the ranks {list(ranks)}; "
            "expected the ranks that get different samples under keras.distribution: "
            f"{list(expected.ranks)}. Leave out process_set and mesh of "
            "hvd.DistributedOptimizer, or pass a Keras optimizer."
        )


def _check_losses(loss: Any, loss_weights: Any, reduction: Reduction) -> None:
    losses = keras.tree.flatten(loss)
    weights = keras.tree.flatten(loss_weights)
    if len(weights) != len(losses):
        weights = [None] * len(losses)
    pairs = [(loss, weight) for loss, weight in zip(losses, weights, strict=True)]
    if text := find_mismatch([p for p in pairs if p[0] is not None], reduction):
        raise JobError(text)


def _start_of(model: keras.Model) -> BroadcastGlobalVariablesCallback:
    """Return the callback that broadcasts in the first `fit` or `train_on_batch`."""
    if not hasattr(model, "_hvdtrain_start"):
        model._hvdtrain_start = BroadcastGlobalVariablesCallback(0)
        model._hvdtrain_start.prepare = prepare
    return model._hvdtrain_start


def fit(method: Method, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
    """Start with the weights of rank 0."""
    call = inspect.signature(method).bind(model, *args, **kwargs)
    given = call.arguments.get("callbacks")
    if isinstance(given, keras.callbacks.CallbackList):
        given = given.callbacks
    callbacks = [c for c in keras.tree.flatten(given) if c is not None]
    starts = [c for c in callbacks if isinstance(c, BroadcastGlobalVariablesCallback)]
    for start in starts:
        start.prepare = prepare
    if not starts:
        callbacks.insert(0, _start_of(model))
    if devices.has_data_ranks():
        _average_layer_states(callbacks)
    call.arguments["callbacks"] = callbacks
    arguments = dict(call.arguments)
    del arguments["self"]
    try:
        return method(model, **arguments)
    finally:
        # A callback of the user may be used without a distribution later.
        for start in starts:
            start.prepare = None


def _average_layer_states(callbacks: list[keras.callbacks.Callback]) -> None:
    """Add the callback that combines weights which layers update in their calls."""
    if any(isinstance(c, AverageMovingStatisticsCallback) for c in callbacks):
        return
    before = BroadcastGlobalVariablesCallback, JoinCallback
    numbers = [n for n, c in enumerate(callbacks) if isinstance(c, before)]
    callbacks.insert(max(numbers) + 1, AverageMovingStatisticsCallback())


def train_on_batch(
    method: Method, model: keras.Model, *args: Any, **kwargs: Any
) -> Any:
    """Start with the weights of rank 0."""
    start = _start_of(model)
    if model.compiled and not start.broadcast_done:
        start.set_model(model)
        # A model that is not built is built in the first call of this function.
        model.make_train_function()
        start.on_train_begin()
    return method(model, *args, **kwargs)


def renew(method: Method, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
    """Call the method with functions that were traced under this distribution."""
    if getattr(model, "_hvdtrain_distribution", None) is not devices.active():
        model._hvdtrain_distribution = devices.active()
        model.train_function = model.test_function = model.predict_function = None
    return method(model, *args, **kwargs)


def get_metrics_result(method: Method, model: keras.Model) -> dict[str, Any]:
    """Return results of the samples of all ranks. The states stay those of the rank."""
    variables, axis = metric_variables(model.metrics), devices.data_axis()
    totals = transport.allreduce(
        addends(variables, variables, Share(axis.index, axis.size)),
        Reduction(op=Sum, process_set=axis.process_set),
        name="Metrics",
    )
    if axis.index == 0:
        warn_of_states(model.metrics)
    states = combined(variables, totals, axis.size)
    with keras.StatelessScope(list(zip(variables, states, strict=True))):
        # A result that is a variable has the value of this rank outside of the scope.
        return keras.tree.map_structure(tf.convert_to_tensor, method(model))


def predict_step(method: Method, model: keras.Model, data: Any) -> Any:
    """Return the outputs of the global batch."""
    outputs = method(model, data)
    leaves = tf.nest.flatten(outputs)
    if not all(isinstance(leaf, tf.Tensor) for leaf in leaves):
        raise JobError(
            "Received ragged or sparse outputs in predict; expected dense ones, which "
            "are gathered from all ranks. Let the model return outputs.to_tensor()."
        )
    gathered = transport.allgather(
        leaves, name="Predictions", process_set=devices.data_axis().process_set
    )
    return tf.nest.pack_sequence_as(outputs, gathered)


def moments(
    method: Method, layer: keras.layers.BatchNormalization, inputs: Any, mask: Any
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the moments of the global batch."""
    # It has a process set of its own.
    if isinstance(layer, SyncBatchNormalization):
        return method(layer, inputs, mask)
    return moments_over_ranks(layer, inputs, mask, devices.data_axis().process_set)


def distribute_dataset(method: Method, distribution: Any, dataset: Any) -> Any:
    """Return this rank's rows of each global batch: those that Keras deals to it.

    All ranks have as many batches as `dataset`, also where their number is not known.
    """
    is_dealt = distribution.auto_shard_dataset and isinstance(dataset, tf.data.Dataset)
    if not is_dealt:
        return method(distribution, dataset)
    spec = dataset.element_spec
    if any(
        isinstance(leaf, tf.SparseTensorSpec) or leaf.shape.rank == 0
        for leaf in tf.nest.flatten(spec)
    ):
        raise JobError(
            f"Received a dataset of {spec}; expected global batches of dense or ragged "
            "tensors. Call dataset.batch(global_batch_size)."
        )

    def rows(*batch: Any) -> Any:
        nest = batch if isinstance(spec, tuple) else batch[0]
        return tf.nest.map_structure(_rows_of_rank, nest)

    return dataset.map(rows, tf.data.AUTOTUNE, deterministic=True).prefetch(1)


def _rows_of_rank(tensor: tf.Tensor | tf.RaggedTensor) -> tf.Tensor | tf.RaggedTensor:
    count, axis = tensor.shape[0] or tf.shape(tensor)[0], devices.data_axis()
    tf.debugging.assert_equal(count % axis.size, 0, _UNEVEN.format(size=axis.size))
    local = count // axis.size
    return tensor[axis.index * local : (axis.index + 1) * local]
