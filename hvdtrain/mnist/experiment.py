"""Train an image classifier from options: its data, specs and callbacks."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence

import keras

import hvdtrain.keras as hvd
from hvdtrain import parallel
from hvdtrain.data import Dataset, Sampler, batches, one_pass
from hvdtrain.data.loading import load_everywhere
from hvdtrain.job.agreement import check_same, fail_together
from hvdtrain.job.world import World
from hvdtrain.mnist import description, models
from hvdtrain.mnist.options import ClassifierOptions
from hvdtrain.mnist.schedule import (
    LearningRateCallback,
    Schedule,
    check_warmup,
    count_steps,
)
from hvdtrain.parallel.replicas import Replicas, make_mesh
from hvdtrain.training import exporting, run_directory
from hvdtrain.training.elastic import Commits, run_elastic
from hvdtrain.training.fit_source import deal
from hvdtrain.training.observers import make_observers
from hvdtrain.training.profiling import ProfileCallback, check_profile_steps
from hvdtrain.training.specs import (
    EvalSpec,
    Plan,
    Position,
    RunConfig,
    TrainSpec,
    fast_steps_per_execution,
)
from hvdtrain.training.train import train_and_evaluate

_EVALUATION_BATCH_SIZE = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """The arguments of `train_and_evaluate`, and the values that describe them.

    Attributes:
        dataset: the data set that the ranks agreed on.
        warning: text for the user if `dataset` is a fallback, else "".
        train_spec: what to train on, and how long.
        eval_spec: what to evaluate on.
        config: where checkpoints are kept.
        batch_ranks: number of replicas that the global batch and the learning rate are
            for. A job that continues on other ranks may keep the number before.
        replicas: the replicas of the model in this job.
        observers: empty on all ranks except the chief.
    """

    dataset: Dataset
    warning: str
    model: keras.Model
    train_spec: TrainSpec
    eval_spec: EvalSpec
    config: RunConfig
    batch_ranks: int
    replicas: Replicas
    observers: Sequence


def train(
    options: ClassifierOptions, world: World, *, report: Callable[[str], object]
) -> None:
    """Train, evaluate, and write the model and the summary. A collective.

    Args:
        options: the same on all ranks, except for paths.
        world: the `World`, of a job that was started with `options.mesh_shape`.
        report: called on the chief with each text for the user.

    Raises:
        JobError: on all ranks, if one of them cannot train.
    """
    mesh = make_mesh(options.mesh_shape)

    # In an elastic job this function is called again after each change of the ranks.
    def train_once(world: World, commits: Commits | None) -> None:
        experiment = build(options, world, commits, mesh)
        info = description.describe_run(
            world,
            options,
            shape=experiment.replicas.shape,
            dataset=experiment.dataset,
            train_spec=experiment.train_spec,
            batch_ranks=experiment.batch_ranks,
        )
        if world.is_chief:
            report(
                description.banner(info, experiment.dataset, warning=experiment.warning)
            )
        result = train_and_evaluate(
            lambda: experiment.model,
            experiment.train_spec,
            experiment.eval_spec,
            experiment.config,
            world=world,
            observers=experiment.observers,
            commits=commits,
        )
        summary = description.summarize(result, info)
        if world.is_chief:
            report(description.last_line(summary))
        if options.model_dir:
            # On all ranks: the full values of a sharded model are gathered.
            run_directory.write(
                world, options.model_dir, model=result.model, summary=summary
            )
            if world.is_chief:
                report(f"written to {options.model_dir}")

    run_elastic(train_once, world)


def build(
    options: ClassifierOptions,
    world: World,
    commits: Commits | None = None,
    mesh: parallel.Mesh | None = None,
) -> Experiment:
    """Load the data and build the model and the specs on all ranks. A collective.

    A job that continues with another number of ranks keeps its global batch and its
    learning rates, of the ranks with which it was first started. With `scale_batch`
    they are computed for the new number of ranks.

    Args:
        options: the same on all ranks, except for paths.
        commits: see `train_and_evaluate`.
        mesh: the `parallel.Mesh` over which the model is sharded; None for data
            parallelism alone.

    Raises:
        JobError: on all ranks, if one of them cannot build it.
    """
    values = dataclasses.asdict(options)
    paths = ("data_dir", "model_dir", "timeline_file")
    check_same(world, values, but=paths, prefix="--")
    dataset, warning = load_everywhere(
        world, options.dataset, data_dir=options.data_dir
    )
    config = _config(options, dataset)
    replicas = Replicas.of(world, mesh)
    position = run_directory.position(config, world, commits, replicas=replicas)
    batch_ranks = replicas.size if options.scale_batch else position.original_size
    # What fails in here on one rank, such as a directory that only the chief writes,
    # would leave the others blocked in the first collective of the training.
    with fail_together(world):
        train_spec = _train_spec(options, dataset, world, replicas, position)
        eval_spec = _eval_spec(options, dataset, replicas)
        observers: Sequence = ()
        if world.is_chief:
            if options.model_dir:
                run_directory.prepare(options.model_dir)
            observers = make_observers(sys.stdout, model_dir=options.model_dir)
        model = models.build(options, dataset, batch_ranks, mesh)
    return Experiment(
        dataset=dataset,
        warning=warning,
        model=model,
        train_spec=train_spec,
        eval_spec=eval_spec,
        config=config,
        batch_ranks=batch_ranks,
        replicas=replicas,
        observers=observers,
    )


def _config(options: ClassifierOptions, dataset: Dataset) -> RunConfig:
    return RunConfig(
        # With other values, a checkpoint would continue with other samples.
        unchanged={
            "dataset": dataset.name,
            "samples": len(dataset.x_train),
            "seed": options.seed,
        },
        model_dir=options.model_dir,
        save_every_steps=options.save_every_steps,
        save_every_seconds=options.save_every_seconds,
        keep_max=options.keep_checkpoints,
        skip_nonfinite=options.skip_nonfinite,
        max_minutes=options.max_minutes,
        commit_every_steps=options.commit_every_steps,
    )


def _sampler(
    options: ClassifierOptions, dataset: Dataset, replicas: Replicas, position: Position
) -> tuple[Sampler, int]:
    """Return the sampler, and the steps of the whole job."""
    sampler = Sampler(
        num_samples=len(dataset.x_train),
        global_batch_size=options.batch_size * position.original_size,
        seed=options.seed,
    )
    max_steps = count_steps(
        sampler,
        size=position.original_size,
        epochs=options.epochs,
        max_steps=options.max_steps,
        accumulation_steps=options.accumulation_steps,
    )
    epochs = (
        options.epochs or max_steps * sampler.global_batch_size / sampler.num_samples
    )
    check_warmup(options.warmup_epochs, epochs=epochs)
    return deal(sampler, max_steps, position, replicas, scale_batch=options.scale_batch)


def _train_spec(
    options: ClassifierOptions,
    dataset: Dataset,
    world: World,
    replicas: Replicas,
    position: Position,
) -> TrainSpec:
    sampler, max_steps = _sampler(options, dataset, replicas, position)
    check_profile_steps(options.profile_steps, max_steps)
    schedule = _schedule(options, sampler, max_steps)
    return TrainSpec(
        input_fn=functools.partial(
            batches, (dataset.x_train, dataset.y_train), sampler
        ),
        max_steps=max_steps,
        pass_steps=sampler.pass_steps,
        local_batch_size=sampler.local_batch_size,
        callbacks=lambda plan: _callbacks(options, schedule, plan, world),
        steps_per_execution=options.steps_per_execution
        or fast_steps_per_execution(
            local_batch_size=sampler.local_batch_size, max_steps=max_steps
        ),
        scale_from=position if options.scale_batch else None,
    )


def _schedule(options: ClassifierOptions, sampler: Sampler, max_steps: int) -> Schedule:
    batch_ranks = sampler.global_batch_size // options.batch_size
    return Schedule(
        learning_rate=options.local_learning_rate * batch_ranks,
        size=batch_ranks,
        max_steps=max_steps,
        warmup_steps=options.warmup_epochs * sampler.pass_steps,
        decay=options.decay,
        offset=sampler.start_sample / sampler.global_batch_size - sampler.start_step,
    )


def _callbacks(
    options: ClassifierOptions, schedule: Schedule, plan: Plan, world: World
) -> list[keras.callbacks.Callback]:
    callbacks = []
    if not schedule.is_constant:
        callbacks.append(LearningRateCallback(schedule, plan))
    if options.consistency_check_steps:
        every_steps = options.consistency_check_steps
        callbacks.append(hvd.callbacks.ConsistencyCheckCallback(every_steps))
    if options.profile_steps and options.model_dir and world.is_chief:
        callbacks.append(
            ProfileCallback(options.model_dir, plan, steps=options.profile_steps)
        )
    return callbacks


def _eval_spec(
    options: ClassifierOptions, dataset: Dataset, replicas: Replicas
) -> EvalSpec:
    of_rank = one_pass(
        (dataset.x_test, dataset.y_test),
        rank=replicas.index,
        size=replicas.size,
        local_batch_size=_EVALUATION_BATCH_SIZE,
    )
    return EvalSpec(
        input_fn=lambda: of_rank,
        every_epochs=options.evaluate_every,
        exporters=[exporting.BY_NAME[name]() for name in options.export or ()],
    )
