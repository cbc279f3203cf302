"""Continuing from a checkpoint."""

import contextlib
import dataclasses
import warnings

import keras

import hvdtrain.keras as hvd
from hvdtrain.collectives.objects import broadcast_object
from hvdtrain.job import JobError
from hvdtrain.job.agreement import gather, on_chief
from hvdtrain.keras.learning_rates import set_learning_rate
from hvdtrain.keras.variables import (
    accumulated_gradients,
    get_inner_optimizer,
    replicated_by_process_set,
)
from hvdtrain.training.checkpoint import state
from hvdtrain.training.checkpoint.per_rank import PerRankState, regrouped
from hvdtrain.training.checkpoint.state_variables import StateVariables
from hvdtrain.training.checkpoint.storage import CheckpointError
from hvdtrain.training.checkpoint.writing import checkpoint_files, wait_together
from hvdtrain.training.replicas import Replicas
from hvdtrain.training.specs import Position

# Learning rates are stored in float32.
_SAME = 1e-5


def check_unchanged(checkpoint, unchanged):
    """Raise `JobError` if one of `RunConfig.unchanged` was another one before."""
    before = checkpoint.metadata.get("unchanged", {})
    for name, value in unchanged.items():
        if name in before and before[name] != value:
            raise JobError(
                f"Received {name}={value}; expected {before[name]}, with which the "
                f"checkpoint of step {checkpoint.step} was written: choose another "
                "model_dir for another job."
            )


def check_batch(checkpoint, global_batch_size, size, *, scale):
    """Raise `JobError` unless the global batch is that before, times `scale`."""
    before = checkpoint.metadata["global_batch_size"]
    if global_batch_size != round(before * scale, 3):
        ranks_before = len(checkpoint.metadata["local_batch_sizes"])
        raise JobError(
            f"Received a global batch of {global_batch_size} samples ({_ranks(size)}); "
            f"expected {before * scale:.9g}: the checkpoint of step {checkpoint.step} "
            f"was written with {before} ({_ranks(ranks_before)}), and the order of the "
            "samples depends on it."
        )


def check_position(checkpoint, scale_from, global_batch_size):
    """Raise `JobError` unless `input_fn` continues where the checkpoint stands."""
    step = checkpoint.step if checkpoint else 0
    sample = checkpoint.metadata["sample"] if checkpoint else 0
    if scale_from and scale_from.step != step:
        raise JobError(
            f"Received scale_from of step {scale_from.step}; expected {step}, that of "
            "the newest checkpoint of this model: delete later ones."
        )
    # The batch of a job that has scaled it may be that of the first start again.
    if not scale_from and sample != step * global_batch_size:
        raise JobError(
            f"Received a checkpoint of step {step} after {sample} samples; expected "
            f"{step * global_batch_size}: the job scales its batch. Set scale_from, or "
            "--scale_batch."
        )


def check_windows(optimizer):
    """Raise `JobError` if the batch may change within an accumulation window."""
    if accumulated_gradients(optimizer):
        raise JobError(
            "Received an optimizer that accumulates gradients in a job that scales its "
            "batch; expected none: a change of the batch could cut a window."
        )


def learning_rate(optimizer):
    """Return the learning rate, or None for that of a schedule.

    A schedule of Keras computes it from the step, and is not in a checkpoint.
    """
    rate = get_inner_optimizer(optimizer).learning_rate
    return float(rate.numpy()) if isinstance(rate, keras.Variable) else None


def adjust_learning_rate(optimizer, checkpoint, rate, *, size, scale):
    """Change the restored learning rate as that of `model_fn` has changed.

    Args:
        optimizer: after the checkpoint was assigned.
        checkpoint: the `Checkpoint`.
        rate: `learning_rate` of the new model.
        size: number of ranks.
        scale: factor of the global batch.
    """
    restored = learning_rate(optimizer)
    if restored is None:
        return
    before = checkpoint.metadata.get("learning_rate")
    factor = scale
    if before and rate:
        size_before = len(checkpoint.metadata["local_batch_sizes"])
        factor = rate / before
        if scale == 1 and abs(factor - size / size_before) < _SAME * factor:
            # model_fn multiplies it by the number of ranks; the batch has not changed.
            factor = 1
        if abs(factor - scale) > _SAME * scale:
            warnings.warn(
                f"The learning rate of model_fn is {rate:g}; it was {before:g} before "
                f"step {checkpoint.step}. Training continues with "
                f"{restored * factor:g}.",
                stacklevel=2,
            )
    if factor != 1:
        set_learning_rate(optimizer, restored * factor)


def _ranks(size):
    return f"{size} {'rank' if size == 1 else 'ranks'}"


_REQUIRED = {
    "local_batch_sizes",
    "global_batch_size",
    "sample",
    "original_size",
    "fit_epoch_steps",
    "steps_per_execution",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run starts.

    Attributes:
        step: steps taken before; 0 for a new job.
        metadata: of the checkpoint; empty for a new job.
        per_rank_state: the `PerRankState`; None for a new job.
        learning_rate: of the new model; None for that of a schedule.
    """

    step: int = 0
    metadata: dict = dataclasses.field(default_factory=dict)
    per_rank_state: PerRankState | None = None
    learning_rate: float | None = None

    def is_finished(self, max_steps, *, global_batch_size):
        """Whether a job of so many steps ends here; a callback may have ended it."""
        if self.step >= max_steps or not self.metadata.get("finished"):
            return self.step >= max_steps
        # With batches of another size, the same job ends within a batch of there.
        before = self.metadata["global_batch_size"]
        left_before = (self.metadata["finished"] - self.step) * before
        left = (max_steps - self.step) * global_batch_size
        return abs(left - left_before) < max(before, global_batch_size)


def position(config, world, commits=None, *, replicas=None):
    """Return the `Position` from which a job continues. A collective.

    Args:
        config: the `RunConfig`.
        world: the `World`.
        replicas: the `Replicas`; by default, each rank is one.
        commits: see `train_and_evaluate`.
    """
    if commits:
        # Of the last run, which may write a newer checkpoint still.
        wait_together(world, commits.writer)
    first_size = (replicas or Replicas.of(world)).size
    if commits:
        first_size = commits.original_size
    stores = [store for store in (commits, checkpoint_files(config)) if store]

    def read():
        for store, step in [(each, step) for each in stores for step in each.steps()]:
            # A damaged one is passed over, as in `restore`.
            with contextlib.suppress(CheckpointError, LookupError):
                metadata = store.verify(step)
                sample, size = metadata["sample"], metadata["original_size"]
                return Position(step=step, sample=sample, original_size=size)
        return Position(step=0, sample=0, original_size=first_size)

    return gather(world, on_chief(world, read))[0]


def restore(
    model, stores, world, *, global_batch_size, scale_from=None, unchanged=None
):
    """Restore the newest valid checkpoint. A collective.

    The chief reads it, and assigns what is equal on all ranks: the broadcast before
    the first step gives it to the others.

    Args:
        model: a built and compiled model whose optimizer is built.
        stores: the `Commits` and the `CheckpointFiles` that there are, of which the
            first with a checkpoint is used; on the chief only.
        world: the `World`.
        global_batch_size: samples of a step of the whole job.
        scale_from: see `TrainSpec`.
        unchanged: see `RunConfig`.

    Returns:
        The `Start`.

    Raises:
        JobError: on all ranks, if there are checkpoints and none is valid, or if the
            job had another global batch.
    """
    rate = learning_rate(model.optimizer)
    replicas = Replicas.of_model(world, model)
    size, variables = replicas.size, StateVariables.of(model)

    def read():
        for store in stores:
            store.delete_leftovers()
        found = next(filter(None, (_newest(variables, each) for each in stores)), None)
        if found:
            check_unchanged(found, unchanged or {})
            before = len(found.metadata["local_batch_sizes"])
            scale = size / before if scale_from else 1
            check_batch(found, global_batch_size, size, scale=scale)
            adjust_learning_rate(model.optimizer, found, rate, size=size, scale=scale)
            if names := state.new_metrics(variables.metrics, found.arrays):
                warnings.warn(
                    f"The checkpoint of step {found.step} has no states of the metrics "
                    f"{', '.join(names)}: they start there.",
                    stacklevel=2,
                )
            for store in stores:
                # Also where the newest commit is used, and the files are not read.
                store.supersede_after(found.step)
        check_position(found, scale_from, global_batch_size)
        if scale_from:
            check_windows(model.optimizer)
        return found

    found = on_chief(world, read)
    header = found and (
        found.step,
        found.metadata,
        list(map(state.number_of, state.by_name(found.arrays, "replicated"))),
    )
    header = broadcast_object(header, name="Start") if world.size > 1 else header
    if header is None:
        return Start(learning_rate=rate)
    step, metadata, replicated = header
    variables = variables.with_replicated(replicated)
    arrays = found and found.arrays
    variables.scatter(arrays and state.ordered_once(arrays))
    if world.size > 1:
        variables.broadcast_untracked(model)
    variables.scale_accumulated(size / len(metadata["local_batch_sizes"]))
    own = PerRankState(
        world, replicas, variables, arrays, metadata["local_batch_sizes"]
    )
    return Start(step=step, metadata=metadata, per_rank_state=own, learning_rate=rate)


def assign_all(model, start):
    """Give all ranks the whole state of a finished job. A collective."""
    variables = [*model.variables, *model.optimizer.variables]
    for process_set, root, copies in replicated_by_process_set(
        model.optimizer, variables
    ):
        hvd.broadcast_variables(copies, root, process_set)
    start.per_rank_state.assign(model)
    # As Keras' fit does at its end: moving averages of the weights, with use_ema.
    model.optimizer.finalize_variable_values(model.trainable_variables)


def _newest(variables, store):
    """Return the newest `Checkpoint` that is valid; None if there is no checkpoint."""
    reasons = []
    for step in store.steps():
        try:
            checkpoint = store.read(step)
            if not checkpoint.metadata.keys() >= _REQUIRED:
                raise CheckpointError(f"{store.path(step)} is incomplete.")
            sizes = checkpoint.metadata["local_batch_sizes"]
            arrays = regrouped(checkpoint.arrays, variables, sizes)
            state.assign_shared(variables, arrays)
        except CheckpointError as error:
            reasons.append(str(error))
        except state.OtherModelError as error:
            reasons.append(f"{store.path(step)} is of another model: {error}.")
        else:
            for reason in reasons:
                warnings.warn(
                    f"{reason} Continuing from step {step} instead.", stacklevel=2
                )
            return dataclasses.replace(checkpoint, arrays=arrays)
    if reasons:
        raise JobError(
            f"No checkpoint can be used. {' '.join(reasons)} Choose another "
            "model_dir for a new job, or delete these files."
        )
    return None


class _RestoringCallback(keras.callbacks.Callback):
    """What both callbacks that restore have in common.

    Args:
        start: the `Start`.
        plan: the `Plan`.
    """

    def __init__(self, start, plan):
        super().__init__()
        self._per_rank_state = start.per_rank_state
        self._is_within_epoch = not plan.is_epoch_end(start.step)


class RestoreGeneratorsCallback(_RestoringCallback):
    """Restores the global random generators, after all other callbacks.

    What callbacks draw when a training or an epoch begins, they have drawn before.
    """

    def on_train_begin(self, logs=None):
        """Restores them."""
        if self._per_rank_state:
            self._per_rank_state.restore_generators()

    def on_epoch_begin(self, epoch, logs=None):
        """Restores them again in an interrupted epoch, and gives back the memory."""
        if self._per_rank_state:
            if self._is_within_epoch:
                self._per_rank_state.restore_generators()
            self._per_rank_state.release()
        self._per_rank_state = None


class RestoreCallback(_RestoringCallback):
    """Restores what differs by rank: after the broadcast, and in the first epoch."""

    def on_train_begin(self, logs=None):
        """Restores seeds, moving statistics and accumulated gradients."""
        if self._per_rank_state:
            self._per_rank_state.assign(self.model)

    def on_epoch_begin(self, epoch, logs=None):
        """Restores the metrics of an interrupted epoch, which `fit` has reset."""
        if self._per_rank_state and self._is_within_epoch:
            self._per_rank_state.assign_metrics(self.model)
        self._per_rank_state = None
