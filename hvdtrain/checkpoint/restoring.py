"""Continuing from a checkpoint: which one, whether it fits, and its assignment."""

import contextlib
import dataclasses
import warnings
from collections.abc import Sequence
from typing import Protocol

import keras

import hvdtrain.keras as hvd
from hvdtrain.checkpoint.header import (
    REPLICATED,
    ArrayGroups,
    Checkpoint,
    Header,
    OtherModelError,
    Position,
    check_batch,
    check_position,
    check_unchanged,
)
from hvdtrain.checkpoint.job_variables import (
    JobVariables,
    without_unlisted,
)
from hvdtrain.checkpoint.per_rank import PerRankState, new_metrics, regroup
from hvdtrain.checkpoint.snapshot import assign_stored_once
from hvdtrain.checkpoint.state_variables import StateVariables
from hvdtrain.checkpoint.step_variables import StepVariables
from hvdtrain.checkpoint.storage import CheckpointError
from hvdtrain.collectives.objects import broadcast_object
from hvdtrain.job import JobError, World
from hvdtrain.job.agreement import gather, on_chief
from hvdtrain.keras.learning_rates import rate_variable, set_learning_rate
from hvdtrain.keras.replication import (
    finalize_weights,
    non_local_variables,
    replicated_by_process_set,
)
from hvdtrain.keras.variables import (
    accumulated_gradients,
    is_multi_optimizer,
    optimizers_inside,
)
from hvdtrain.parallel.replicas import Replicas

# Learning rates are stored in float32.
_RELATIVE_ERROR = 1e-5


class Store(Protocol):
    """Checkpoints in files (`CheckpointFiles`) or in memory (`Commits`)."""

    def steps(self) -> list[int]: ...
    def path(self, step: int) -> object: ...
    def header(self, step: int) -> Header: ...
    def read(self, step: int) -> Checkpoint: ...
    def verify(self, step: int) -> Header: ...
    def prepare(self) -> None: ...
    def supersede_after(self, step: int) -> None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run starts: the header of its checkpoint or of a new job.

    `learning_rate` is the rate of the new model; see `Header`. `place` is where the
    checkpoint was read, empty for a new job.
    """

    header: Header
    per_rank_state: PerRankState | None = None
    learning_rate: float | None = None
    place: str = ""

    @property
    def step(self) -> int:
        return self.header.step

    def is_finished(self, max_steps: int, *, global_batch_size: int) -> bool:
        """Whether a job of so many steps ends here; a callback may have ended it."""
        if self.step >= max_steps or not self.header.finished:
            return self.step >= max_steps
        # With batches of another size, the same job has as many samples left, to within
        # a batch.
        before = self.header.global_batch_size
        left_before = (self.header.finished - self.step) * before
        left = (max_steps - self.step) * global_batch_size
        return abs(left - left_before) < max(before, global_batch_size)


def newest_position(
    stores: Sequence[Store], world: World, *, original_size: int
) -> Position:
    """Return the `Position` of the newest valid checkpoint. A collective.

    Args:
        stores: in order of preference; the chief reads them.
        original_size: of a new job.
    """

    def read() -> Position:
        for store, step in [(s, step) for s in stores for step in s.steps()]:
            # Skip damaged checkpoints, as `restore` does.
            with contextlib.suppress(CheckpointError):
                header = store.verify(step)
                return Position(
                    step=step,
                    sample=header.sample,
                    original_size=header.original_size,
                )
        return Position(step=0, sample=0, original_size=original_size)

    chief_position = gather(world, on_chief(world, read))[0]
    assert chief_position
    return chief_position


def restore(
    model: keras.Model,
    stores: Sequence[Store],
    world: World,
    *,
    new_job: Header,
    step_variables: StepVariables,
    scale_from: Position | None = None,
) -> Start:
    """Restore the newest valid checkpoint. A collective.

    The chief reads the checkpoint and assigns all that is replicated: the broadcast
    before the first step gives it to the others. Shards and per-rank state are sent
    here, since no broadcast follows for them.

    Args:
        model: a compiled model whose optimizer is built.
        stores: in order of preference; on the chief only.
        new_job: the header with which the job would start without a checkpoint.
        step_variables: a step is traced if the checkpoint has variables of it that
            Keras does not list.
        scale_from: see `TrainSpec`.

    Raises:
        JobError: on all ranks, if there are checkpoints and none is valid, or if the
            job had another global batch.
    """
    rate = _learning_rate(model.optimizer)
    replicas = Replicas.of_model(world, model)
    of_job = JobVariables.of(model)
    if _have_unlisted(stores, world):
        of_job = of_job.with_unlisted(model, step_variables, world)
    checkpoint = on_chief(
        world,
        lambda: _read(
            model.optimizer,
            of_job,
            stores,
            new_job=new_job,
            rate=rate,
            scale_from=scale_from,
        ),
    )
    arrays = checkpoint.arrays if checkpoint else {}
    groups = ArrayGroups(arrays)
    header = checkpoint.header if checkpoint else None
    place = checkpoint.place if checkpoint else ""
    replicated = list(groups.by_number(REPLICATED))
    if world.size > 1:
        header, place, replicated = broadcast_object(
            (header, place, replicated), name="Start"
        )
    if header is None:
        return Start(header=new_job, learning_rate=rate)
    variables = of_job.in_checkpoint(header).with_replicated(replicated)
    variables.scatter(groups.values_stored_once())
    if world.size > 1:
        variables.broadcast_unlisted(model)
    variables.scale_accumulated(replicas.size / header.size)
    if world.is_chief and replicas.size != header.size:
        _warn_of_per_replica(variables)
    return Start(
        header=header,
        per_rank_state=PerRankState(
            world, replicas, variables, arrays, header.local_batch_sizes
        ),
        learning_rate=rate,
        place=place,
    )


def _have_unlisted(stores: Sequence[Store], world: World) -> bool:
    """Whether a checkpoint has variables that Keras does not list. A collective."""

    def read() -> bool:
        for store, step in [(s, step) for s in stores for step in s.steps()]:
            with contextlib.suppress(CheckpointError):
                if store.header(step).unlisted:
                    return True
        return False

    return bool(gather(world, on_chief(world, read))[0])


def _read(
    optimizer: keras.optimizers.Optimizer,
    of_job: JobVariables,
    stores: Sequence[Store],
    *,
    new_job: Header,
    rate: float | None,
    scale_from: Position | None,
) -> Checkpoint | None:
    """Read and assign the newest valid checkpoint, and check that it fits the job."""
    for store in stores:
        store.prepare()
    newest = (_newest(of_job, store) for store in stores)
    checkpoint = next(filter(None, newest), None)
    if checkpoint:
        before = checkpoint.header
        scale = new_job.size / before.size if scale_from else 1
        check_unchanged(before, new_job)
        check_batch(before, new_job, scale=scale)
        _adjust_learning_rate(optimizer, before, rate, size=new_job.size, scale=scale)
        _warn_of_new_metrics(of_job.listed, checkpoint)
        for store in stores:
            # Also in files, if the newest commit is used: later files are of steps
            # that are taken again.
            store.supersede_after(checkpoint.step)
    check_position(checkpoint.header if checkpoint else new_job, scale_from)
    if scale_from:
        _check_scales(optimizer)
    return checkpoint


def assign_all(model: keras.Model, start: Start) -> None:
    """Give all ranks the full state of a finished job. A collective.

    In a job that trains, the loop does this before the first step.
    """
    assert start.per_rank_state
    variables = non_local_variables(model)
    for process_set, root, copies in replicated_by_process_set(
        model.optimizer, variables
    ):
        hvd.broadcast_variables(copies, root, process_set)
    start.per_rank_state.assign(model)
    finalize_weights(model)


def _newest(of_job: JobVariables, store: Store) -> Checkpoint | None:
    """Assign and return the newest valid checkpoint; None if there is none.

    Variables that Keras does not list are left out if they do not match.
    """
    reasons = []
    for step in store.steps():
        try:
            checkpoint = store.read(step)
            if difference := of_job.difference(checkpoint):
                checkpoint = without_unlisted(checkpoint)
            variables = of_job.in_checkpoint(checkpoint.header)
            sizes = checkpoint.header.local_batch_sizes
            arrays = regroup(checkpoint.arrays, variables, sizes)
            assign_stored_once(variables, arrays)
        except CheckpointError as error:
            reasons.append(str(error))
        except OtherModelError as error:
            reasons.append(f"{store.path(step)} is of another model: {error}.")
        else:
            for reason in reasons:
                warnings.warn(
                    f"{reason} Continuing from step {step} instead.", stacklevel=2
                )
            if difference:
                warnings.warn(
                    f"The checkpoint of step {step} has {difference}: the variables of "
                    "the step that Keras does not list start anew, as in a new job.",
                    stacklevel=2,
                )
            place = str(store.path(step))
            return dataclasses.replace(checkpoint, arrays=arrays, place=place)
    if reasons:
        raise JobError(
            f"No checkpoint can be used. {' '.join(reasons)} Choose another "
            "model_dir for a new job, or delete these files."
        )
    return None


def _warn_of_per_replica(variables: StateVariables) -> None:
    numbers = [n for n in variables.unlisted if n in variables.per_replica]
    if names := [variables.own[number].path for number in numbers]:
        warnings.warn(
            f"The training step uses {', '.join(names)}, which differ by rank. With "
            "another number of ranks than before, each rank takes the value of the "
            "rank with its number, or of the first one: sums over the samples of a "
            "rank are not continued.",
            stacklevel=3,
        )


def _warn_of_new_metrics(variables: StateVariables, checkpoint: Checkpoint) -> None:
    if names := new_metrics(variables, checkpoint.arrays):
        warnings.warn(
            f"The checkpoint of step {checkpoint.step} has no states of the metrics "
            f"{', '.join(names)}: they start there.",
            stacklevel=3,
        )


def _learning_rate(optimizer: keras.optimizers.Optimizer) -> float | None:
    """Return the learning rate; None for a schedule, or several optimizers."""
    optimizers = optimizers_inside(optimizer)
    rate = rate_variable(optimizers[0]) if len(optimizers) == 1 else None
    return None if rate is None else float(rate.numpy())


def _adjust_learning_rate(
    optimizer: keras.optimizers.Optimizer,
    before: Header,
    rate: float | None,
    *,
    size: int,
    scale: float,
) -> None:
    """Change the restored learning rate as the `rate` of `model_fn` has changed.

    The checkpoint has been assigned; `scale` is the factor of the global batch.
    """
    restored = _learning_rate(optimizer)
    if restored is None:
        return
    factor = scale
    if before.learning_rate and rate:
        factor = rate / before.learning_rate
        if scale == 1 and abs(factor - size / before.size) < _RELATIVE_ERROR * factor:
            # model_fn multiplies it by the number of ranks; the batch has not changed.
            factor = 1
        if abs(factor - scale) > _RELATIVE_ERROR * scale:
            warnings.warn(
                f"The learning rate of model_fn is {rate:g}; it was "
                f"{before.learning_rate:g} before step {before.step}. Training "
                f"continues with {restored * factor:g}.",
                stacklevel=2,
            )
    if factor != 1:
        set_learning_rate(optimizer, restored * factor)


def _check_scales(optimizer: keras.optimizers.Optimizer) -> None:
    """Check an optimizer whose learning rate is scaled with the batch."""
    if is_multi_optimizer(optimizer):
        raise JobError(
            "Received a MultiOptimizer in a job that scales its batch; expected an "
            "optimizer with one learning rate, which is scaled with the batch."
        )
    if accumulated_gradients(optimizer):
        raise JobError(
            "Received an optimizer that accumulates gradients in a job that scales its "
            "batch; expected none: a change of the batch could cut a window."
        )
