"""Train and evaluate a Keras model on all ranks."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import keras

from hvdtrain.checkpoint.header import Header
from hvdtrain.checkpoint.names import without_numbers
from hvdtrain.checkpoint.restoring import Start, assign_all, restore
from hvdtrain.checkpoint.writing import wait_for_writer
from hvdtrain.flight import member
from hvdtrain.job import World
from hvdtrain.job.agreement import check_same, fail_together, gather, on_chief
from hvdtrain.job.files import is_address
from hvdtrain.job.world import PreemptedError
from hvdtrain.keras.unlisted import learned_state
from hvdtrain.native import recorder
from hvdtrain.stores.lease import Lease
from hvdtrain.stores.mirror import local_directory
from hvdtrain.training import exporting, loop, run_directory
from hvdtrain.training.building import (
    Batches,
    agree_on_batches,
    build,
    check_no_distribution,
)
from hvdtrain.training.elastic import Commits
from hvdtrain.training.session import RunState, Session
from hvdtrain.training.skipping import Skipping
from hvdtrain.training.specs import EvalSpec, Result, RunConfig, TrainSpec


def train_and_evaluate(
    model_fn: Callable[[], keras.Model],
    train_spec: TrainSpec,
    eval_spec: EvalSpec,
    config: RunConfig | None = None,
    *,
    world: World,
    observers: Sequence[object] = (),
    commits: Commits | None = None,
) -> Result:
    """Train a model on all ranks, then evaluate it over the whole test set.

    With a `model_dir`, a job that was stopped or killed continues from its newest
    checkpoint there, and computes what the uninterrupted job computes. A job that is
    finished trains nothing, and returns its last metrics.

    Args:
        model_fn: returns a compiled Keras model. Its optimizer becomes a
            `DistributedOptimizer` if it is not one.
        observers: objects whose methods are called on the chief, each as far as it has
            them: `on_start(start)` with a `RunStart`, or `on_finished(start, metrics)`
            for a job that had finished before, with its last metrics;
            `on_progress(progress)` with a `Progress` every second,
            `on_evaluation(step, metrics)` after an evaluation,
            `on_checkpoint(step, text)` when a checkpoint was written, or was not,
            `on_export(step, text)` for exports, and `on_end(end)` with a `RunEnd` after
            a run that was neither stopped nor killed.
        commits: in an elastic job, what `run_elastic` passes.

    Raises:
        PreemptedError: on all ranks, when the job was asked to stop.
        JobError: on all ranks, when local batch sizes differ and the model has tables
            that are sharded over the data ranks, when there is a `BackupAndRestore`
            among the callbacks, when a `keras.distribution` is active, when the loss is
            not finite, when there are checkpoints and none can be used, when another
            job uses the directory, or when the last checkpoint or an export of the last
            step cannot be written.
    """
    config = config or RunConfig()
    with fail_together(world):
        check_no_distribution()
    _check_alike(train_spec, eval_spec, config, world)
    if commits:
        # The writer of the last run may still write to the directory.
        wait_for_writer(world, commits.writer)
    lease = None
    with contextlib.ExitStack() as stack:
        stack.enter_context(recorder.phase("start"))
        if config.model_dir:
            directory = config.model_dir
            lease = stack.enter_context(_claimed(config, world))
            with fail_together(world):
                if world.is_chief:
                    directory = str(local_directory(config.model_dir))
                    member.clear(directory)
            if is_address(config.model_dir):
                # Of the chief's host; ranks of other hosts do not see it.
                directory = str(gather(world, directory)[0])
            member.use_directory(directory)
            stack.enter_context(run_directory.recorded(config.model_dir, world))
        return _train_and_evaluate(
            model_fn,
            train_spec,
            eval_spec,
            config,
            world,
            observers=observers if world.is_chief else (),
            commits=commits,
            lease=lease,
        )


@contextlib.contextmanager
def _claimed(config: RunConfig, world: World) -> Iterator[Lease | None]:
    """Apply `run_directory.claimed` on the chief. A collective, but after an error."""
    with contextlib.ExitStack() as stack:
        lease = on_chief(
            world, lambda: stack.enter_context(run_directory.claimed(config))
        )
        try:
            yield lease
        except PreemptedError as error:
            details = type(error), error, error.__traceback__
            on_chief(world, lambda: stack.__exit__(*details))
            raise
        # On all ranks: launchers kill the chief in its last upload once another rank
        # has ended.
        on_chief(world, stack.close)


_ALIKE = (
    *("max_steps", "repeat", "scale_from", "check_input"),
    *("every_epochs", "throttle_steps"),
    *("save_every_steps", "commit_every_steps", "seed", "skip_nonfinite"),
)


def _check_alike(
    train_spec: TrainSpec, eval_spec: EvalSpec, config: RunConfig, world: World
) -> None:
    """Check the options that decide what the ranks do together. A collective."""
    options = vars(train_spec) | vars(eval_spec) | vars(config)
    values = {name: options[name] for name in _ALIKE}
    values["model_dir"] = config.model_dir is not None
    values["exporters"] = [exporter.name for exporter in eval_spec.exporters]
    check_same(world, values)


def _train_and_evaluate(
    model_fn: Callable[[], keras.Model],
    train_spec: TrainSpec,
    eval_spec: EvalSpec,
    config: RunConfig,
    world: World,
    *,
    observers: Sequence[object],
    commits: Commits | None,
    lease: Lease | None,
) -> Result:
    if config.seed is not None:
        keras.utils.set_random_seed(config.seed)
    has_checkpoints = bool(config.model_dir or commits)
    model, digest, step_variables = build(
        model_fn, train_spec, world, has_checkpoints=has_checkpoints
    )
    with fail_together(world):
        # Before the training: what `input_fn` returns may be an error.
        eval_spec.batches()
    exports = exporting.prepare(
        eval_spec.exporters, model, world, observers, model_dir=config.model_dir
    )
    batches = agree_on_batches(model, train_spec, world, digest)
    files = run_directory.checkpoint_files(config, lease)
    stores = [store for store in (commits, files) if store]
    new_job = _new_job(model, batches, config, commits)
    start = Start(header=new_job)
    if stores:
        start = restore(
            model,
            stores,
            world,
            new_job=new_job,
            step_variables=step_variables,
            scale_from=train_spec.scale_from,
        )
    run = RunState(
        model=model,
        world=world,
        config=config,
        batches=batches,
        plan=batches.plan.continued_from(start.header),
        start=start,
        step_variables=step_variables,
        files=files,
        commits=commits,
        exports=exports,
        skipping=Skipping(
            start.header.skipped_updates,
            model if config.skip_nonfinite else None,
        ),
        observers=observers,
    )
    session = Session(run)
    if world.is_chief:
        run.warn_of_changes()
    if run.is_finished:
        assign_all(model, start)
        session.complete(eval_spec)
    else:
        loop.train(session, train_spec, eval_spec)
    return session.result


def _new_job(
    model: keras.Model, batches: Batches, config: RunConfig, commits: Commits | None
) -> Header:
    """Return the header with which a job without checkpoints starts."""
    local_sizes = batches.local_sizes
    # Checkpoints hold variables, and no vocabulary: `model_fn` has to make the same.
    learned = enumerate(learned_state(model, is_derived=False), start=1)
    # By their order, too: the names of two layers may differ by the number alone.
    texts = {
        f"{without_numbers(value.name)} (number {number})": value.text
        for number, value in learned
    }
    return Header(
        step=0,
        local_batch_sizes=local_sizes,
        global_batch_size=sum(local_sizes),
        unchanged=texts | config.unchanged,
        sample=0,
        original_size=commits.original_size if commits else len(local_sizes),
        fit_epoch_steps=batches.plan.fit_epoch_steps,
        steps_per_execution=batches.plan.steps_per_execution,
    )
