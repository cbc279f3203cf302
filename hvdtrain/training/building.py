"""The model before its first step, and the batch sizes on which the ranks agree."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import keras
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain.checkpoint.header import FirstBatch
from hvdtrain.checkpoint.step_variables import StepVariables
from hvdtrain.job import JobError, World
from hvdtrain.job.agreement import fail_together, gather
from hvdtrain.keras import compiled_gradients
from hvdtrain.keras.callbacks import fit_start
from hvdtrain.keras.optimizer import configure_compiled_model
from hvdtrain.keras.replication import get_hook
from hvdtrain.keras.variables import is_distributed
from hvdtrain.parallel.mesh import Mesh
from hvdtrain.parallel.replicas import Replicas, get_mesh
from hvdtrain.sharding.shards import has_summed_gradients
from hvdtrain.training.inputs import first_batch, first_step
from hvdtrain.training.specs import Plan, TrainSpec


class Batches(NamedTuple):
    """What the replicas agree on before the first step.

    Attributes:
        local_sizes: samples in a batch of each replica.
        first: to be kept in checkpoints; None if the input is not checked.
    """

    local_sizes: tuple[int, ...]
    plan: Plan
    first: FirstBatch | None


def check_no_distribution() -> None:
    """Raise a JobError under a distribution, which would deal and reduce again."""
    active = keras.distribution.distribution()
    if active is not None:
        raise JobError(
            f"Received the active distribution {type(active).__name__} in "
            "hvdtrain.training; expected none: call "
            "keras.distribution.set_distribution(None), and use parallel.fully_shard "
            "or mesh= to shard weights. Under a distribution, model.fit trains."
        )


def check_mesh(model: keras.Model, mesh: Mesh | None) -> None:
    """Raise a JobError unless the samples are dealt to the replicas of the model."""
    found = get_mesh(model)
    shapes = [each.shape if each else None for each in (found, mesh)]
    # A mesh without sharded axes deals as no mesh does.
    splits = [shape for shape in shapes if shape and shape.splits_model]
    if splits and shapes[0] != shapes[1]:
        raise JobError(
            f"Received mesh={shapes[1]}, and from make_model a model whose optimizer "
            f"is distributed over {shapes[0]}; expected one mesh for both, or none."
        )


def build(
    model_fn: Callable[[], keras.Model],
    train_spec: TrainSpec,
    world: World,
    *,
    has_checkpoints: bool,
) -> tuple[keras.Model, str | None, StepVariables]:
    """Return the built model, and the digest of its first batch. A collective.

    The batch itself is not returned: it would stay in memory. `StepVariables` have
    its shapes. A job continues from a checkpoint or from a commit: the input is not
    checked without these.
    """
    # Before `compile`, which resolves "auto".
    compiled_gradients.install()
    model = model_fn()
    is_checked = train_spec.check_input and has_checkpoints
    batch, digest = first_batch(train_spec, world, is_checked=is_checked)
    _build_with(model, batch, train_spec.local_batch_size)
    return model, digest, StepVariables(batch, are_stored=has_checkpoints)


def agree_on_batches(
    model: keras.Model, train_spec: TrainSpec, world: World, digest: str | None
) -> Batches:
    """Agree on batch sizes, and weight the gradients by them. A collective.

    Raises:
        JobError: on all ranks, if the batch sizes differ and the model has embedding
            tables that are sharded over the data ranks.
    """
    # Ranks may have batches of different sizes, and so different plans.
    own = train_spec.local_batch_size, digest
    replicas = Replicas.of_model(world, model)
    values_by_replica = replicas.of_each(gather(world, own))
    local_sizes, digests = zip(*values_by_replica, strict=True)
    with fail_together(world):
        _check_batch_sizes(model, local_sizes)
    weight = train_spec.local_batch_size * replicas.size / sum(local_sizes)
    hook = get_hook(model.optimizer)
    assert hook, "build makes every optimizer distributed"
    # With op=Sum, losses are sums over samples.
    if hook.reducer.options.reduction.op == hvd.Average:
        hook.weigh_gradients(weight)
    first = FirstBatch(step=first_step(train_spec), digests=list(digests))
    # The chief's plan: other ranks may have other batches, or no callbacks.
    plan = gather(world, Plan.of(train_spec, global_batch_size=sum(local_sizes)))[0]
    return Batches(local_sizes, plan, first if digest else None)


def _build_with(
    model: keras.Model, batch: tf.Tensor | tuple | dict, local_batch_size: int
) -> None:
    """Give a compiled model a distributed optimizer and all variables."""
    if not getattr(model, "compiled", False):
        raise JobError(
            f"Received {type(model).__name__} from model_fn; expected a compiled Keras "
            "model: call its compile()."
        )
    if not is_distributed(model.optimizer):
        hvd.DistributedOptimizer(model.optimizer)
    configure_compiled_model(model)
    # Keras builds the metrics of `compile` with the first batch. A checkpoint that was
    # written within an epoch has states for them, so they must exist before `restore`.
    x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
    size = keras.tree.flatten(x)[0].shape[0]
    if size != local_batch_size:
        raise JobError(
            f"Received a batch of {size} samples from input_fn; expected "
            f"local_batch_size={local_batch_size}, by which the ranks are "
            "weighted."
        )
    # A user's `train_step`, of a variational autoencoder for example, may use neither
    # `call` nor `compute_loss`.
    has_call = type(model).call is not keras.Model.call
    has_step = type(model).train_step is not keras.Model.train_step
    if y is None and model.loss is not None and not has_step:
        raise JobError(
            "Received batches without targets for a model with a loss; expected pairs "
            "of inputs and targets."
        )
    if has_call or not has_step:
        has_loss = model.loss is not None or not has_step
        fit_start.build(model, functools.partial(_forward, model, has_loss), batch)
    # `loop.train` loops over the steps of an execution itself. Evaluations run batch
    # by batch, so that the ranks can vote on a stop between two batches.
    model.steps_per_execution = 1
    model.test_function = model.predict_function = None
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def _forward(model: keras.Model, has_loss: bool, batch: tf.Tensor | tuple) -> None:
    x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
    predictions = model(x)
    # With several losses, Keras builds a metric for each here.
    if has_loss:
        model.compute_loss(x, y, predictions, weights)
    model.compute_metrics(x, y, predictions, weights)


def _check_batch_sizes(model: keras.Model, local_sizes: tuple[int, ...]) -> None:
    if len(set(local_sizes)) == 1:
        return
    if has_summed_gradients(model.trainable_variables):
        raise JobError(
            "The model has embedding tables that are sharded over the data ranks, "
            "whose gradients cannot be weighted by rank. Expected: equal local batch "
            f"sizes. Received: {', '.join(map(str, local_sizes))}. Choose a "
            f"global batch size that is divisible by {len(local_sizes)}."
        )
