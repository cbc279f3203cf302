"""Train and evaluate a Keras model on all ranks. The loop is Keras' `fit`."""

import contextlib
import warnings
from collections.abc import Callable

import keras

from hvdtrain.job.agreement import check_same, fail_together, gather
from hvdtrain.job.world import JobError, World
from hvdtrain.keras.variables import get_hook
from hvdtrain.sharding.shards import has_summed_gradients
from hvdtrain.training import exporting, run_directory
from hvdtrain.training.checkpoint.restoring import Start, assign_all, restore
from hvdtrain.training.checkpoint.storage import CheckpointFiles
from hvdtrain.training.checkpoint.writing import checkpoint_files, wait_together
from hvdtrain.training.elastic import Commits
from hvdtrain.training.fitting import built
from hvdtrain.training.inputs import first_batch, first_step, warn_if_changed
from hvdtrain.training.plan import Plan
from hvdtrain.training.replicas import Replicas
from hvdtrain.training.session import Run, Session
from hvdtrain.training.skipping import Skipping
from hvdtrain.training.specs import RunConfig, TrainSpec


def train_and_evaluate(
    model_fn,
    train_spec,
    eval_spec,
    config=None,
    *,
    world,
    observers=(),
    commits=None,
):
    """Train a model on all ranks, then evaluate it over the whole test set.

    With a `model_dir`, a job that was stopped or killed continues from its newest
    checkpoint there, and computes what the uninterrupted job computes. A job that is
    finished trains nothing, and returns its last metrics.

    Args:
        model_fn: returns a compiled Keras model. Its optimizer becomes a
            `DistributedOptimizer` if it is not one.
        train_spec: a `TrainSpec`.
        eval_spec: an `EvalSpec`.
        config: a `RunConfig`.
        world: the `World`.
        observers: objects whose methods are called on the chief, each as far as it has
            them: `on_start(start)` with a `RunStart`, `on_progress(progress)` with a
            `Progress` every second, `on_evaluation(step, metrics)` after an evaluation,
            `on_checkpoint(step, text)` when a checkpoint was written, or was not, and
            `on_export(step, text)` for exports.
        commits: in an elastic job, what `run_elastic` gives.

    Returns:
        A `Result`.

    Raises:
        PreemptedError: on all ranks, when the job was asked to stop.
        JobError: on all ranks, when local batch sizes differ and the model has tables
            that are divided over the data ranks, when the loss is not finite, when
            there are checkpoints and none can be used, when another job uses the
            directory, or when the last checkpoint or an export of the last step cannot
            be written.
    """
    config = config or RunConfig()
    _check_alike(train_spec, eval_spec, config, world)
    with contextlib.ExitStack() as stack:
        if config.model_dir:
            with fail_together(world):
                if world.is_chief:
                    stack.enter_context(run_directory.locked(config.model_dir))
            stack.enter_context(run_directory.recorded(config.model_dir, world))
        return _train_and_evaluate(
            model_fn,
            train_spec,
            eval_spec,
            config,
            world,
            observers=observers if world.is_chief else (),
            commits=commits,
        )


_ALIKE = (
    *("max_steps", "repeat", "scale_from", "check_input"),
    *("every_epochs", "throttle_steps"),
    *("save_every_steps", "commit_every_steps", "seed", "skip_nonfinite"),
)


def _check_alike(train_spec, eval_spec, config, world):
    """Check the options that decide what the ranks do together. A collective."""
    options = vars(train_spec) | vars(eval_spec) | vars(config)
    values = {name: options[name] for name in _ALIKE}
    values["model_dir"] = config.model_dir is not None
    values["exporters"] = [exporter.name for exporter in eval_spec.exporters]
    check_same(world, values)


def _train_and_evaluate(
    model_fn, train_spec, eval_spec, config, world, *, observers, commits
):
    if config.seed is not None:
        keras.utils.set_random_seed(config.seed)
    # A checkpoint, or a commit, is what a job continues from.
    is_checked = train_spec.check_input and bool(config.model_dir or commits)
    model, digest = _build(model_fn, train_spec, world, is_checked=is_checked)
    with fail_together(world):
        # What it returns is checked before the training, not after it.
        eval_spec.batches()
    exports = exporting.prepare(
        eval_spec.exporters, model, world, observers, model_dir=config.model_dir
    )
    local_batch_sizes, plan, first = _agree_on_batches(model, train_spec, world, digest)
    global_batch_size = sum(local_batch_sizes)
    files, start = _restore(
        model, train_spec, config, world, commits, global_batch_size=global_batch_size
    )
    skipping = Skipping(
        start.metadata.get("skipped_updates", 0),
        model if config.skip_nonfinite else None,
    )
    plan = plan.as_before(start.metadata)
    session = Session(
        Run(
            world=world,
            config=config,
            plan=plan,
            start=start,
            local_batch_sizes=local_batch_sizes,
            files=files,
            commits=commits,
            exports=exports,
            skipping=skipping,
            observers=observers,
            first_batch=first,
        )
    )
    if world.is_chief:
        warn_if_changed(first, start.metadata, local_batch_sizes=local_batch_sizes)
        _warn_if_beyond(plan.max_steps, start.step)
    if start.is_finished(plan.max_steps, global_batch_size=global_batch_size):
        assign_all(model, start)
        session.complete(model, eval_spec)
    else:
        session.run(model, train_spec, eval_spec)
    return session.result(model)


def _build(
    model_fn: Callable, train_spec: TrainSpec, world: World, *, is_checked: bool
) -> tuple[keras.Model, str | None]:
    """Return the built model, and the digest of its first batch. A collective.

    The batch itself is not returned: it would stay in memory.
    """
    model = model_fn()
    batch, digest = first_batch(train_spec, world, is_checked=is_checked)
    size = train_spec.local_batch_size
    return built(model, batch, local_batch_size=size), digest


def _restore(
    model: keras.Model,
    train_spec: TrainSpec,
    config: RunConfig,
    world: World,
    commits: Commits | None,
    *,
    global_batch_size: int,
) -> tuple[CheckpointFiles | None, Start]:
    """Return the `CheckpointFiles`, and where the run starts. A collective."""
    if commits:
        # The writer of the last run, before this one reads and writes the directory.
        wait_together(world, commits.writer)
    files = checkpoint_files(config)
    stores = [store for store in (commits, files) if store]
    if not stores:
        return files, Start()
    return files, restore(
        model,
        stores,
        world,
        global_batch_size=global_batch_size,
        scale_from=train_spec.scale_from,
        unchanged=config.unchanged,
    )


def _agree_on_batches(
    model: keras.Model, train_spec: TrainSpec, world: World, digest: str | None
) -> tuple[tuple[int, ...], Plan, dict | None]:
    """Return what the ranks agree on. A collective.

    Returns:
        The batch size of each replica, the plan of all, and what a checkpoint has of
        their first batches: None if there is no digest.
    """
    # Ranks may have batches of different sizes, and so different plans.
    own = train_spec.local_batch_size, Plan.of(train_spec), digest
    replicas = Replicas.of_model(world, model)
    of_each = replicas.of_each(gather(world, own))
    local_batch_sizes, plans, digests = zip(*of_each, strict=True)
    with fail_together(world):
        _check_batch_sizes(model, local_batch_sizes)
    weight = train_spec.local_batch_size * replicas.size / sum(local_batch_sizes)
    get_hook(model.optimizer).weigh_gradients(weight)
    first = {"step": first_step(train_spec), "digests": list(digests)}
    return local_batch_sizes, plans[0], first if digest else None


def _check_batch_sizes(model, local_batch_sizes):
    if len(set(local_batch_sizes)) == 1:
        return
    if has_summed_gradients(model.trainable_variables):
        raise JobError(
            "The model has embedding tables that are divided over the data ranks, "
            "whose gradients cannot be weighted by rank. Expected: equal local batch "
            f"sizes. Received: {', '.join(map(str, local_batch_sizes))}. Choose a "
            f"global batch size that is divisible by {len(local_batch_sizes)}."
        )


def _warn_if_beyond(max_steps, step):
    if step > max_steps:
        warnings.warn(
            f"The checkpoint of step {step} is beyond max_steps={max_steps}: nothing "
            "is trained.",
            stacklevel=4,
        )
