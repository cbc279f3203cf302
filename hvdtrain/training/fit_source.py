"""`fit`: train a model on a source of samples, with exact resume, in one call."""

import dataclasses
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from hvdtrain import parallel
from hvdtrain.data.batching import Transform
from hvdtrain.job import World
from hvdtrain.job.agreement import fail_together
from hvdtrain.parallel.replicas import Replicas
from hvdtrain.stores.mirror import local_directory
from hvdtrain.training import run_directory
from hvdtrain.training.building import check_mesh
from hvdtrain.training.dealt_samples import ByRanks, DealtSamples
from hvdtrain.training.elastic import Commits, run_elastic
from hvdtrain.training.inputs import as_samples, naming_validation
from hvdtrain.training.observers import make_observers
from hvdtrain.training.specs import (
    EvalSpec,
    Plan,
    Result,
    RunConfig,
    TrainSpec,
)
from hvdtrain.training.train import train_and_evaluate

Callbacks = (
    Sequence[keras.callbacks.Callback]
    | Callable[[Plan], Sequence[keras.callbacks.Callback]]
)

# What `fit` computes for the specs, or takes by another name.
_COMPUTED = {
    *("input_fn", "pass_steps", "local_batch_size", "scale_from", "repeat"),
    *("max_steps", "callbacks", "steps", "model_dir", "seed"),
}
# Arguments of `keras.Model.fit`, and what to use here.
_OF_KERAS = {
    "batch_size": "global_batch_size",
    "class_weight": "sample weights, as the third element of a sample",
    "initial_epoch": "model_dir, from which a job continues",
    "steps_per_epoch": "max_steps, of the whole job",
    "validation_data": "validation",
    "validation_freq": "every_epochs",
    "x": "source",
}


def fit(
    make_model: Callable[[], keras.Model],
    source: Any,
    *,
    global_batch_size: ByRanks,
    world: World,
    epochs: int | None = None,
    max_steps: ByRanks | None = None,
    validation: Any = None,
    validation_batch_size: int | None = None,
    validation_steps: int | None = None,
    model_dir: str | None = None,
    transform: Transform | None = None,
    workers: int | None = None,
    callbacks: Callbacks = (),
    seed: int | None = None,
    mesh: parallel.Mesh | None = None,
    scale_batch: bool = False,
    observers: Sequence[object] | None = None,
    commits: Commits | None = None,
    **options: Any,
) -> Result:
    """Train a model on a source of samples, and evaluate it. A collective.

    With a `model_dir`, a job that was stopped or killed continues from its newest
    checkpoint, on any number of ranks, with the samples that it has not read. In an
    elastic job, the training goes on when workers are lost or added.

    Args:
        make_model: returns a compiled Keras model. Its optimizer becomes a
            `DistributedOptimizer` if it is not one. Its learning rate is the one for
            `global_batch_size`.
        source: training samples, as for `data.batches`: pairs of inputs and targets,
            with weights if any, as for `keras.Model.fit`.
        global_batch_size: samples of a step of all ranks together, as many as there are
            ranks or more. Or a function of the number of ranks, or of replicas of a
            sharded model, with which the job was first started:
            `lambda ranks: 64 * ranks` for 64 samples of each.
        world: what `job.start` returned.
        epochs: passes over `source`; or give `max_steps`.
        max_steps: steps of the whole job, or a function as for `global_batch_size`.
        validation: source of samples to evaluate on after each epoch and at the end, as
            many as there are ranks or more. None for no evaluation.
        validation_batch_size: samples in a batch of an evaluation on each rank; by
            default as many as in a batch of the training.
        validation_steps: batches of each rank that are evaluated, None for all.
        model_dir: directory of checkpoints and logs, from which the job continues; see
            `RunConfig`. None for none.
        transform: see `data.batches`. It is applied to training samples only.
        workers: see `data.batches`.
        callbacks: Keras callbacks of this rank; or a function of the `Plan` that
            returns them. For their states in checkpoints, see `callback_states`.
        seed: of the order of samples, of initial weights and of random layers; None for
            the seed of `job.start`.
        mesh: over which the model is sharded; None for data parallelism alone.
        scale_batch: when the number of ranks changes, keep the batch of each rank. The
            global batch and the learning rate follow it. By default the global batch
            is kept, and the job computes the same on any number of ranks.
        observers: see `train_and_evaluate`; by default `make_observers`, which print
            the progress, and write logs to `model_dir`.
        commits: what `run_elastic` passes to a function that calls `fit`. Without it,
            `fit` calls `run_elastic` itself.
        options: other fields of `TrainSpec` (`steps_per_execution` ...), of `EvalSpec`
            (`every_epochs`, `exporters` ...) and of `RunConfig` (`save_every_seconds`,
            `keep_max` ...).

    Returns:
        The `Result`, the same on all ranks except for the times.

    Raises:
        JobError: as `train_and_evaluate`; or if the source differs between the ranks or
            from the one with which the job was started.
        TypeError: an option is not a field of these classes.
    """
    with naming_validation():
        tested = None if validation is None else as_samples(validation)
    samples = DealtSamples(
        source=as_samples(source),
        validation=tested,
        global_batch_size=global_batch_size,
        epochs=epochs,
        max_steps=max_steps,
        validation_batch_size=validation_batch_size,
        seed=world.seed if seed is None else seed,
        scale_batch=scale_batch,
        transform=transform,
        workers=workers,
    )
    of_train, of_evaluation, of_run = _options(options)
    of_train["callbacks"] = _as_function(callbacks)

    def make_checked() -> keras.Model:
        model = make_model()
        check_mesh(model, mesh)
        return model

    # In an elastic job this function is called again after each change of the ranks.
    def train(world: World, commits: Commits | None) -> Result:
        config = RunConfig(**of_run, model_dir=model_dir, seed=seed)
        replicas = Replicas.of(world, mesh)
        position = samples.agree(
            world,
            replicas,
            config,
            commits,
            is_checked=of_train.get("check_input", True),
        )
        watching: Sequence[object] = observers or ()
        with fail_together(world):
            train_spec = samples.train_spec(replicas, position, of_train)
            eval_spec = samples.eval_spec(
                replicas,
                local_batch_size=train_spec.local_batch_size,
                steps=validation_steps,
                **of_evaluation,
            )
            config = samples.with_unchanged(config)
            if observers is None and world.is_chief:
                watching = _default_observers(config)
        return train_and_evaluate(
            make_checked,
            train_spec,
            eval_spec,
            config,
            world=world,
            observers=watching,
            commits=commits,
        )

    return train(world, commits) if commits else run_elastic(train, world)


def _default_observers(config: RunConfig) -> Sequence[object]:
    if config.model_dir:
        # First: later calls find the local directory of an address by the address.
        directory = local_directory(config.model_dir, config.local_dir)
        run_directory.prepare(directory)
    return make_observers(sys.stdout, model_dir=config.model_dir)


def _as_function(
    callbacks: Callbacks,
) -> Callable[[Plan], Sequence[keras.callbacks.Callback]] | None:
    if callable(callbacks):
        return callbacks
    # None: without callbacks, executions may have several steps.
    return (lambda plan: callbacks) if callbacks else None


def _options(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the fields of `TrainSpec`, `EvalSpec` and `RunConfig` among options."""
    names = [
        {field.name for field in dataclasses.fields(spec)} - _COMPUTED
        for spec in (TrainSpec, EvalSpec, RunConfig)
    ]
    known = set().union(*names)
    for name in options.keys() - known:
        if equivalent := _OF_KERAS.get(name):
            raise TypeError(f"Received {name}; expected {equivalent}.")
        own = [name for name in inspect.signature(fit).parameters if name != "options"]
        raise TypeError(
            f"Received {name}; expected {', '.join(own)}, or one of "
            f"{', '.join(sorted(known))}."
        )
    return [{name: options[name] for name in options if name in of} for of in names]
