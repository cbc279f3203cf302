"""An image classifier from options: data, model, optimizer and specs."""

import dataclasses
import sys

import keras

import hvdtrain.keras as hvd
from hvdtrain.classifier import description, models
from hvdtrain.classifier.schedule import (
    LearningRateCallback,
    Schedule,
    check_warmup,
    steps_of_run,
)
from hvdtrain.data import Dataset, Sampler, streams
from hvdtrain.data.loading import load_everywhere
from hvdtrain.job.agreement import check_same, fail_together
from hvdtrain.job.world import MeshShape
from hvdtrain.training import exporting, run_directory
from hvdtrain.training.checkpoint import restoring
from hvdtrain.training.elastic import run_elastic
from hvdtrain.training.loop import train_and_evaluate
from hvdtrain.training.observers import make_observers
from hvdtrain.training.plan import fast_steps_per_execution
from hvdtrain.training.profiling import ProfileCallback, check_profile_steps
from hvdtrain.training.replicas import Replicas, make_mesh
from hvdtrain.training.specs import EvalSpec, RunConfig, TrainSpec

_EVALUATION_BATCH_SIZE = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What `build` returns: the arguments of `train_and_evaluate`, and their data.

    `batch_ranks` is the number of ranks that the global batch and the rate are for:
    of replicas, where the model is divided over the ranks of `mesh_shape`.
    """

    dataset: Dataset
    warning: str
    model: keras.Model
    train_spec: TrainSpec
    eval_spec: EvalSpec
    config: RunConfig
    batch_ranks: int
    mesh_shape: MeshShape
    observers: list


def train(options, world, mesh_shape, *, report):
    """Train, evaluate, and write the model and the summary. A collective.

    Args:
        options: the `Options`; apart from paths the same on all ranks.
        world: the `World`.
        mesh_shape: the `MeshShape` of the job.
        report: called on the chief with each text for the user.

    Raises:
        JobError: on all ranks, if one of them cannot train.
    """
    mesh = make_mesh(mesh_shape)

    def train_once(world, commits):
        run = build(options, world, commits, mesh)
        info = description.run_info(world, options, run)
        if world.is_chief:
            report(description.banner(info, run.dataset, warning=run.warning))
        result = train_and_evaluate(
            lambda: run.model,
            run.train_spec,
            run.eval_spec,
            run.config,
            world=world,
            observers=run.observers,
            commits=commits,
        )
        summary = description.summarize(result, info)
        if world.is_chief:
            report(description.last_line(summary))
        if options.model_dir:
            run_directory.write(
                world, options.model_dir, model=result.model, summary=summary
            )
            if world.is_chief:
                report(f"written to {options.model_dir}")

    # In an elastic job it is called again after each change of the job.
    run_elastic(train_once, world)


def build(options, world, commits=None, mesh=None):
    """Build a run on all ranks. A collective.

    A job that continues with another number of ranks keeps its global batch and its
    learning rates: those of the number that it was first started with, or with
    `scale_batch` those of the new number.

    Args:
        options: the `Options`; apart from paths the same on all ranks.
        world: the `World`.
        commits: see `train_and_evaluate`.
        mesh: the `parallel.Mesh` over which the model is divided; None for data
            parallelism alone.

    Returns:
        The `Run`.

    Raises:
        JobError: on all ranks, if one of them cannot build it.
    """
    values = dataclasses.asdict(options)
    own = ("data_dir", "model_dir", "timeline_file")
    check_same(world, values, but=own, prefix="--")
    dataset, warning = load_everywhere(
        world, options.dataset, data_dir=options.data_dir
    )
    config = _config(options, dataset)
    replicas = Replicas.of(world, mesh)
    position = restoring.position(config, world, commits, replicas=replicas)
    batch_ranks = replicas.size if options.scale_batch else position.original_size
    with fail_together(world):
        train_spec = _train_spec(options, dataset, world, replicas, position)
        eval_spec = _eval_spec(options, dataset, replicas)
        observers = ()
        if world.is_chief:
            if options.model_dir:
                run_directory.prepare(options.model_dir)
            observers = make_observers(sys.stdout, model_dir=options.model_dir)
        model = models.build(options, dataset, batch_ranks, mesh)
    return Run(
        dataset=dataset,
        warning=warning,
        model=model,
        train_spec=train_spec,
        eval_spec=eval_spec,
        config=config,
        batch_ranks=batch_ranks,
        mesh_shape=replicas.shape,
        observers=observers,
    )


def _config(options, dataset):
    return RunConfig(
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


def _sampler(options, dataset, replicas, position):
    """Return the `Sampler`, and the steps of the whole job."""
    sampler = Sampler(
        num_samples=len(dataset.x_train),
        global_batch_size=options.batch_size * position.original_size,
        seed=options.seed,
        rank=replicas.index,
        size=replicas.size,
    )
    max_steps = steps_of_run(
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
    if options.scale_batch:
        end = max_steps * sampler.global_batch_size
        sampler = dataclasses.replace(
            sampler,
            global_batch_size=options.batch_size * replicas.size,
            start_step=position.step,
            start_sample=position.sample,
        )
        max_steps = sampler.steps_to(end)
    return sampler, max_steps


def _train_spec(options, dataset, world, replicas, position):
    sampler, max_steps = _sampler(options, dataset, replicas, position)
    check_profile_steps(options.profile_steps, max_steps)
    schedule = _schedule(options, sampler, max_steps)
    return TrainSpec(
        input_fn=lambda start_step, end_step: streams.train_batches(
            dataset.x_train,
            dataset.y_train,
            sampler=sampler,
            start_step=start_step,
            end_step=end_step,
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


def _schedule(options, sampler, max_steps):
    batch_ranks = sampler.global_batch_size // options.batch_size
    return Schedule(
        learning_rate=options.local_learning_rate * batch_ranks,
        size=batch_ranks,
        max_steps=max_steps,
        warmup_steps=options.warmup_epochs * sampler.pass_steps,
        decay=options.decay,
        offset=sampler.start_sample / sampler.global_batch_size - sampler.start_step,
    )


def _callbacks(options, schedule, plan, world):
    callbacks = []
    if not schedule.is_constant:
        callbacks.append(LearningRateCallback(schedule, plan))
    if options.consistency_check_steps:
        every_steps = options.consistency_check_steps
        callbacks.append(hvd.callbacks.ConsistencyCheckCallback(every_steps))
    if options.profile_steps and world.is_chief:
        directory, steps = options.model_dir, options.profile_steps
        callbacks.append(ProfileCallback(directory, plan, steps=steps))
    return callbacks


def _eval_spec(options, dataset, replicas):
    batches = streams.evaluation_batches(
        dataset.x_test,
        dataset.y_test,
        rank=replicas.index,
        size=replicas.size,
        local_batch_size=_EVALUATION_BATCH_SIZE,
    )
    return EvalSpec(
        input_fn=lambda: batches,
        every_epochs=options.evaluate_every,
        exporters=[exporting.BY_NAME[name]() for name in options.export or ()],
    )
