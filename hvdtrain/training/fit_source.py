"""`fit`: train a model on a source of samples, with exact resume, in one call."""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain import parallel
from hvdtrain.data.batching import Transform, batches, one_pass
from hvdtrain.data.sampler import Sampler
from hvdtrain.data.sources.source import Source
from hvdtrain.job import JobError, World
from hvdtrain.job.agreement import check_same, fail_together
from hvdtrain.parallel.replicas import Replicas
from hvdtrain.training import run_directory
from hvdtrain.training.elastic import Commits, run_elastic
from hvdtrain.training.exporting import BestExporter
from hvdtrain.training.inputs import as_samples, check_source
from hvdtrain.training.observers import make_observers
from hvdtrain.training.specs import (
    EvalSpec,
    Plan,
    Position,
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
    global_batch_size: int,
    world: World,
    epochs: int | None = None,
    max_steps: int | None = None,
    validation: Any = None,
    validation_steps: int | None = None,
    model_dir: str | None = None,
    transform: Transform | None = None,
    workers: int | None = None,
    callbacks: Callbacks = (),
    seed: int | None = None,
    mesh: parallel.Mesh | None = None,
    scale_batch: bool = False,
    observers: Sequence[object] | None = None,
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
            ranks or more.
        world: what `job.start` returned.
        epochs: passes over `source`; or give `max_steps`, of the whole job.
        validation: source of samples to evaluate on after each epoch and at the end, as
            many as there are ranks or more. None for no evaluation.
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
    numbers = {"epochs": epochs, "max_steps": max_steps}
    _check_integers({"global_batch_size": global_batch_size} | numbers)
    samples = _Samples(
        source=as_samples(source),
        validation=None if validation is None else as_samples(validation),
        global_batch_size=global_batch_size,
        epochs=epochs,
        max_steps=max_steps,
        seed=world.seed if seed is None else seed,
        scale_batch=scale_batch,
        transform=transform,
        workers=workers,
    )
    of_train, of_evaluation, of_run = _options(options)
    of_train["callbacks"] = _as_function(callbacks)

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
            specs = (
                samples.train_spec(replicas, position, of_train),
                samples.eval_spec(replicas, steps=validation_steps, **of_evaluation),
                samples.with_unchanged(config),
            )
            if observers is None and world.is_chief:
                watching = _default_observers(config)
        return train_and_evaluate(
            make_model, *specs, world=world, observers=watching, commits=commits
        )

    return run_elastic(train, world)


def deal(
    sampler: Sampler,
    max_steps: int,
    position: Position,
    replicas: Replicas,
    *,
    scale_batch: bool,
) -> tuple[Sampler, int]:
    """Return the sampler of this rank, and the last step of the job.

    Args:
        sampler: of one rank, with the global batch of `position.original_size`
            replicas.
        max_steps: the last step with this batch.
        position: from which the job continues.
        scale_batch: whether the batch follows the number of ranks. The job then ends at
            the same sample, and takes another number of steps to it.
    """
    if scale_batch:
        original_size = position.original_size
        local_batch_size, rest = divmod(sampler.global_batch_size, original_size)
        if rest:
            raise JobError(
                f"Received a global batch of {sampler.global_batch_size} for "
                f"{original_size} ranks in a job that scales its batch; expected a "
                f"multiple of {original_size}."
            )
        end = max_steps * sampler.global_batch_size
        sampler = dataclasses.replace(
            sampler,
            global_batch_size=local_batch_size * replicas.size,
            start_step=position.step,
            start_sample=position.sample,
        )
        max_steps = sampler.steps_to(end)
    return dataclasses.replace(
        sampler, rank=replicas.index, size=replicas.size
    ), max_steps


def _check_integers(numbers: Mapping[str, Any]) -> None:
    for name, value in numbers.items():
        is_integer = isinstance(value, int | np.integer) and value is not True
        if value is not None and not (is_integer and value > 0):
            raise JobError(f"Received {name}={value}; expected 1 or more, an integer.")


def _default_observers(config: RunConfig) -> Sequence[object]:
    if config.model_dir:
        run_directory.prepare(config.model_dir)
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Samples:
    """The arguments of `fit` by which samples are dealt to the ranks; see there."""

    source: Source
    validation: Source | None
    global_batch_size: int
    epochs: int | None
    max_steps: int | None
    seed: int
    scale_batch: bool
    transform: Transform | None
    workers: int | None

    @functools.cached_property
    def fingerprint(self) -> Any:
        """The source's, for which all names of files may be hashed."""
        return self.source.fingerprint()

    def agree(
        self,
        world: World,
        replicas: Replicas,
        config: RunConfig,
        commits: Commits | None,
        *,
        is_checked: bool,
    ) -> Position:
        """Return from where the job continues. A collective."""
        validation = None
        if self.validation is not None:
            validation = self.validation.fingerprint()
        check_same(
            world,
            {
                "source": self.fingerprint,
                "validation": validation,
                "global_batch_size": self.global_batch_size,
                "epochs": self.epochs,
                "scale_batch": self.scale_batch,
                "seed": self.seed,
                "check_input": is_checked,
            },
        )
        if is_checked:
            check_source(self.source, world)
        return run_directory.position(config, world, commits, replicas=replicas)

    def with_unchanged(self, config: RunConfig) -> RunConfig:
        """Return the config with what a job that continues must not change."""
        own = {"source": self.fingerprint, "seed": self.seed}
        if given := own.keys() & config.unchanged.keys():
            raise JobError(
                f"Received unchanged with {', '.join(sorted(given))}; expected other "
                "keys: fit has values for these."
            )
        return dataclasses.replace(config, unchanged=own | config.unchanged)

    def train_spec(
        self,
        replicas: Replicas,
        position: Position,
        options: Mapping[str, Any],
    ) -> TrainSpec:
        """Return the spec, for which `options` has other fields."""
        sampler = Sampler(
            num_samples=len(self.source),
            global_batch_size=self.global_batch_size,
            seed=self.seed,
        )
        sampler, max_steps = deal(
            sampler,
            self._count_steps(sampler),
            position,
            replicas,
            scale_batch=self.scale_batch,
        )
        return TrainSpec(
            input_fn=lambda start_step, end_step: batches(
                self.source,
                sampler,
                start_step,
                end_step,
                transform=self.transform,
                workers=self.workers,
            ),
            max_steps=max_steps,
            pass_steps=sampler.pass_steps,
            local_batch_size=sampler.local_batch_size,
            scale_from=position if self.scale_batch else None,
            **options,
        )

    def eval_spec(
        self, replicas: Replicas, *, every_epochs: int | None = None, **options: Any
    ) -> EvalSpec:
        """Return the spec, for which `options` has other fields."""
        exporters = options.get("exporters", ())
        if self.validation is None:
            if any(isinstance(exporter, BestExporter) for exporter in exporters):
                raise JobError(
                    "Received a BestExporter without validation; expected samples by "
                    "which the best model is known."
                )
            return EvalSpec(input_fn=None, every_epochs=every_epochs or 0, **options)
        # Made once: TensorFlow keeps the Python functions of each dataset.
        batches_of_rank = one_pass(
            self.validation,
            rank=replicas.index,
            size=replicas.size,
            local_batch_size=max(1, self.global_batch_size // replicas.size),
            workers=self.workers,
        )
        return EvalSpec(
            input_fn=lambda: batches_of_rank,
            every_epochs=1 if every_epochs is None else every_epochs,
            **options,
        )

    def _count_steps(self, sampler: Sampler) -> int:
        if (self.epochs is None) == (self.max_steps is None):
            raise JobError(
                f"Received epochs={self.epochs} and max_steps={self.max_steps}; "
                "expected one of them."
            )
        return self.max_steps or sampler.steps(self.epochs or 0)
