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
from hvdtrain.keras.layers import SyncBatchNormalization, moments_over_ranks
from hvdtrain.keras.metrics import metric_variables
from hvdtrain.keras.optimizer import DistributedOptimizer
from hvdtrain.keras.replication import get_hook
from hvdtrain.parallel.mesh import Mesh

# The mean over ranks of such losses is not the loss of the global batch.
_OTHER_REDUCTIONS = ("sum", "none", None, "mean_with_sample_weight")
_UNEVEN = (
    "Received a global batch whose number of samples {size} ranks do not divide. "
    "Pass drop_remainder=True to dataset.batch, and a batch size that is divisible."
)


def compile_distributed(
    method: Method,
    model: keras.Model,
    optimizer: Any = "rmsprop",
    loss: Any = None,
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
    method(model, optimizer, loss, *args, **kwargs)
    # Keras enables it on GPUs.
    model.jit_compile = False
    if model.built:
        prepare(model)
    if model.optimizer is None:
        return
    found = devices.active_mesh()
    mesh = found if isinstance(found, Mesh) else None
    hook = get_hook(model.optimizer)
    if hook is None:
        _check_reductions(loss)
        # Gradients of tables are dense, as on JAX.
        DistributedOptimizer(model.optimizer, sparse_as_dense=True, mesh=mesh)
    elif mesh and not (hook.mesh and hook.mesh.shape == mesh.shape):
        raise JobError(
            "Received an optimizer that is distributed, and not over the mesh of "
            "keras.distribution.ModelParallel; expected a new Keras optimizer, which "
            "compile distributes over it."
        )


def _check_reductions(loss: Any) -> None:
    for each in keras.tree.flatten(loss):
        reduction = getattr(each, "reduction", "sum_over_batch_size")
        if devices.has_data_ranks() and reduction in _OTHER_REDUCTIONS:
            raise JobError(
                f"Received the loss {each.name} with reduction={reduction!r}; expected "
                "a mean over samples, whose gradients are averaged over the ranks. Use "
                "reduction='sum_over_batch_size', or under DataParallel, for losses "
                "that are sums, hvd.DistributedOptimizer(optimizer, op=hvd.Sum)."
            )


class _DistributionStart(BroadcastGlobalVariablesCallback):
    """Broadcasts in the first `fit` or `train_on_batch` of a model.

    The model is then built, if it was not in `compile`.
    """

    def _broadcast(self) -> None:
        prepare(self.model)
        super()._broadcast()

    def _warn_of_moving_statistics(self) -> None:
        """Print nothing: `moments` makes the statistics equal on all ranks."""


def _start_of(model: keras.Model) -> _DistributionStart:
    if not hasattr(model, "_hvdtrain_start"):
        model._hvdtrain_start = _DistributionStart(0)
    return model._hvdtrain_start


def fit(method: Method, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
    """Start with the weights of rank 0."""
    call = inspect.signature(method).bind(model, *args, **kwargs)
    given = call.arguments.get("callbacks")
    if isinstance(given, keras.callbacks.CallbackList):
        given = given.callbacks
    callbacks = [c for c in keras.tree.flatten(given) if c is not None]
    if not any(isinstance(c, BroadcastGlobalVariablesCallback) for c in callbacks):
        callbacks.insert(0, _start_of(model))
    call.arguments["callbacks"] = callbacks
    arguments = dict(call.arguments)
    del arguments["self"]
    return method(model, **arguments)


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
    variables = metric_variables(model.metrics)
    totals = transport.allreduce(
        [_addend(variable) for variable in variables],
        Reduction(op=Sum, process_set=devices.data_axis().process_set),
        name="Metrics",
    )
    with keras.StatelessScope(list(zip(variables, totals, strict=True))):
        return method(model)


def _addend(variable: keras.Variable) -> tf.Tensor:
    state, axis = tf.convert_to_tensor(variable), devices.data_axis()
    if variable.aggregation == "mean":
        return tf.cast(state / axis.size, state.dtype)
    is_added = variable.aggregation != "only_first_replica" or axis.index == 0
    return state if is_added else tf.zeros_like(state)


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
