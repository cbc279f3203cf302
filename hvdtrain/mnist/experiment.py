"""Train an image classifier on all ranks, by `training.fit`."""

import functools
from collections.abc import Callable

import keras

import hvdtrain.keras as hvd
from hvdtrain import optimizers, parallel, training
from hvdtrain.data import Dataset
from hvdtrain.data.loading import load_everywhere
from hvdtrain.job import World
from hvdtrain.job.agreement import check_same
from hvdtrain.mnist import models, schedule, summary
from hvdtrain.mnist.options import ClassifierOptions
from hvdtrain.parallel.replicas import make_mesh
from hvdtrain.stores.mirror import local_directory
from hvdtrain.training import exporting, run_directory
from hvdtrain.training.elastic import Commits, run_elastic
from hvdtrain.training.profiling import ProfileCallback, check_profile_steps

_EVALUATION_BATCH_SIZE = 256
# Flags that are arguments of `training.fit`.
_FLAGS_OF_FIT = (
    *("scale_batch", "model_dir", "save_every_steps", "save_every_seconds"),
    *("skip_nonfinite", "max_minutes", "commit_every_steps", "steps_per_execution"),
)


def make_model(
    options: ClassifierOptions, dataset: Dataset, mesh: parallel.Mesh | None
) -> keras.Model:
    """Return the compiled model, whose learning rate is scaled by the ranks.

    Args:
        mesh: over which the model is sharded; None for a replicated model.

    Raises:
        JobError: the model cannot be sharded over this mesh.
    """
    if options.mixed_precision != "none":
        keras.mixed_precision.set_global_policy(f"mixed_{options.mixed_precision}")
    model = models.make(options, dataset, mesh)
    replicas = mesh.data.size if mesh else hvd.size()
    optimizer = hvd.DistributedOptimizer(
        optimizers.make(
            options.optimizer,
            learning_rate=options.local_learning_rate * replicas,
            accumulation_steps=options.accumulation_steps,
        ),
        compression=getattr(hvd.Compression, options.compression),
        mesh=mesh,
        shard_state=options.shard_optimizer_state,
    )
    return models.compile_classifier(model, optimizer)


def fit(
    options: ClassifierOptions,
    dataset: Dataset,
    world: World,
    mesh: parallel.Mesh | None = None,
    commits: Commits | None = None,
) -> training.Result:
    """Train and evaluate the model on the samples of each rank. A collective.

    A job that continues with another number of ranks keeps its global batch and its
    learning rates, of the ranks with which it was first started. With `scale_batch`
    they are computed for the new number of ranks.
    """
    return training.fit(
        functools.partial(make_model, options, dataset, mesh),
        (dataset.x_train, dataset.y_train),
        global_batch_size=lambda ranks: options.batch_size * ranks,
        max_steps=functools.partial(
            schedule.count_steps, options, len(dataset.x_train)
        ),
        validation=(dataset.x_test, dataset.y_test),
        validation_batch_size=_EVALUATION_BATCH_SIZE,
        every_epochs=options.evaluate_every,
        exporters=[exporting.BY_NAME[name]() for name in options.export or ()],
        callbacks=functools.partial(_callbacks, options, dataset, world),
        seed=options.seed,
        # Data of another name may have the same shapes.
        unchanged={"dataset": dataset.name},
        world=world,
        mesh=mesh,
        commits=commits,
        keep_max=options.keep_checkpoints,
        **{name: getattr(options, name) for name in _FLAGS_OF_FIT},
    )


def _callbacks(
    options: ClassifierOptions, dataset: Dataset, world: World, plan: training.Plan
) -> list[keras.callbacks.Callback]:
    check_profile_steps(options.profile_steps, plan.max_steps)
    callbacks = []
    rates = schedule.Schedule.of(options, len(dataset.x_train), plan)
    if not rates.is_constant:
        callbacks.append(schedule.LearningRateCallback(rates, plan))
    if every_steps := options.consistency_check_steps:
        callbacks.append(hvd.callbacks.ConsistencyCheckCallback(every_steps))
    if options.profile_steps and options.model_dir and world.is_chief:
        callbacks.append(
            ProfileCallback(
                local_directory(options.model_dir), plan, steps=options.profile_steps
            )
        )
    return callbacks


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
        dataset, warning = load(options, world)
        if world.is_chief:
            report(summary.first_lines(options, dataset, warning=warning))
        result = fit(options, dataset, world, mesh, commits)
        values = summary.summarize(result, options, dataset)
        if world.is_chief:
            report(summary.last_line(values))
        if options.model_dir:
            # On all ranks: the full values of a sharded model are gathered.
            run_directory.write(
                world, options.model_dir, model=result.model, summary=values
            )
            if world.is_chief:
                report(f"written to {options.model_dir}")

    run_elastic(train_once, world)


def load(options: ClassifierOptions, world: World) -> tuple[Dataset, str]:
    """Return the data set of all ranks, and a warning for the user. A collective."""
    values = vars(options)
    paths = ("data_dir", "model_dir", "timeline_file")
    check_same(world, values, but=paths, prefix="--")
    return load_everywhere(world, options.dataset, data_dir=options.data_dir)
