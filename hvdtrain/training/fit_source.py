"""`fit`: train a model on a source of samples, with exact resume, in one call."""

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from hvdtrain import parallel
from hvdtrain.data.batching import Transform, batches, one_pass
from hvdtrain.data.sampler import Order, Sampler
from hvdtrain.data.sources.source import Source, as_source
from hvdtrain.job import JobError, World
from hvdtrain.job.agreement import check_same, fail_together
from hvdtrain.training import run_directory
from hvdtrain.training.checkpoint import restoring
from hvdtrain.training.elastic import Commits, run_elastic
from hvdtrain.training.loop import train_and_evaluate
from hvdtrain.training.observers import make_observers
from hvdtrain.training.replicas import Replicas
from hvdtrain.training.specs import EvalSpec, Position, Result, RunConfig, TrainSpec

# What `fit` computes for the specs.
_COMPUTED = {"input_fn", "pass_steps", "local_batch_size", "scale_from"}
# The key of `RunConfig.unchanged` that names the order of the samples. Checkpoints of
# earlier versions have none.
_ORDER = "order"


def fit(
    make_model: Callable[[], keras.Model],
    source: Any,
    *,
    global_batch_size: int,
    validation: Any,
    world: World,
    epochs: int | None = None,
    transform: Transform | None = None,
    workers: int | None = None,
    mesh: parallel.Mesh | None = None,
    scale_batch: bool = False,
    observers: Sequence[object] | None = None,
    **options: Any,
) -> Result:
    """Train a model on a source of samples, then evaluate it. A collective.

    With a `model_dir`, a job that was stopped or killed continues from its newest
    checkpoint, on any number of ranks, with the samples that it has not read. In an
    elastic job, the training goes on when workers are lost or added.

    Args:
        make_model: returns a compiled Keras model. Its optimizer becomes a
            `DistributedOptimizer` if it is not one. Its learning rate is the one for
            `global_batch_size`.
        source: training samples, as for `data.batches`: pairs of inputs and targets,
            with weights if any, as for `keras.Model.fit`.
        global_batch_size: samples of a step, of all ranks together.
        validation: samples to evaluate on, after each epoch and at the end.
        world: what `job.start` returned.
        epochs: passes over `source`; or give `max_steps`.
        transform: see `data.batches`. It is applied to training samples only.
        workers: see `data.batches`.
        mesh: over which the model is sharded; None for data parallelism alone.
        scale_batch: when the number of ranks changes, keep the batch of each rank. The
            global batch and the learning rate follow it. By default the global batch
            is kept, and the job computes the same on any number of ranks.
        observers: see `train_and_evaluate`; by default `make_observers`, which print
            the progress, and write logs to `model_dir`.
        options: fields of `TrainSpec` (`max_steps`, `callbacks` ...), of `EvalSpec`
            (`every_epochs`, `exporters` ...) and of `RunConfig` (`model_dir`,
            `save_every_seconds` ...).

    Returns:
        The `Result`, the same on all ranks except for the times.

    Raises:
        JobError: as `train_and_evaluate`; or if the source differs between the ranks or
            from the one with which the job was started.
        TypeError: an option is not a field of these classes.
    """
    training = _SourceTraining(
        source=as_source(source),
        validation=as_source(validation),
        global_batch_size=global_batch_size,
        epochs=epochs,
        transform=transform,
        workers=workers,
        mesh=mesh,
        scale_batch=scale_batch,
        seed=world.seed,
        options=_Options.of(options),
    )

    # In an elastic job this function is called again after each change of the ranks.
    def train(world: World, commits: Commits | None) -> Result:
        specs = training.specs(world, commits)
        watching: Sequence[object] = observers or ()
        with fail_together(world):
            if observers is None and world.is_chief:
                watching = _default_observers(specs[-1])
        return train_and_evaluate(
            make_model, *specs, world=world, observers=watching, commits=commits
        )

    return run_elastic(train, world)


def scaled(sampler: Sampler, max_steps: int, position: Position) -> tuple[Sampler, int]:
    """Return a sampler whose batch follows the number of ranks, and its last step.

    The job ends at the same sample, and takes another number of steps to it.

    Args:
        sampler: with the global batch of `position.original_size` replicas.
        position: from which the job continues.
    """
    local_batch_size, rest = divmod(sampler.global_batch_size, position.original_size)
    if rest:
        raise JobError(
            f"Received a global batch of {sampler.global_batch_size} for "
            f"{position.original_size} ranks in a job that scales its batch; expected "
            f"a multiple of {position.original_size}."
        )
    end = max_steps * sampler.global_batch_size
    sampler = dataclasses.replace(
        sampler,
        global_batch_size=local_batch_size * sampler.size,
        start_step=position.step,
        start_sample=position.sample,
    )
    return sampler, sampler.steps_to(end)


def _default_observers(config: RunConfig) -> Sequence[object]:
    if config.model_dir:
        run_directory.prepare(config.model_dir)
    return make_observers(sys.stdout, model_dir=config.model_dir)


@dataclasses.dataclass(frozen=True)
class _Options:
    """The fields of the specs that a user has given, by spec."""

    train: Mapping[str, Any]
    evaluation: Mapping[str, Any]
    run: Mapping[str, Any]

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "_Options":
        names = [
            [field.name for field in dataclasses.fields(spec)]
            for spec in (TrainSpec, EvalSpec, RunConfig)
        ]
        known = {name for fields in names for name in fields} - _COMPUTED
        if unknown := options.keys() - known:
            raise TypeError(
                f"Received {', '.join(sorted(unknown))}; expected arguments of fit, or "
                f"of these: {', '.join(sorted(known))}."
            )
        train, evaluation, run = (
            {name: options[name] for name in fields if name in options}
            for fields in names
        )
        return cls(train, {"every_epochs": 1} | evaluation, run)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SourceTraining:
    """The arguments of `fit` from which the specs follow; see there."""

    source: Source
    validation: Source
    global_batch_size: int
    epochs: int | None
    transform: Transform | None
    workers: int | None
    mesh: parallel.Mesh | None
    scale_batch: bool
    seed: int
    options: _Options

    def specs(
        self, world: World, commits: Commits | None
    ) -> tuple[TrainSpec, EvalSpec, RunConfig]:
        """Return the arguments of `train_and_evaluate`. A collective."""
        check_same(
            world,
            {
                "source": self.source.fingerprint(),
                "validation": self.validation.fingerprint(),
                "global_batch_size": self.global_batch_size,
                "epochs": self.epochs,
                "scale_batch": self.scale_batch,
                "seed": self.seed,
            },
        )
        config = RunConfig(**self.options.run)
        replicas = Replicas.of(world, self.mesh)
        position = restoring.position(config, world, commits, replicas=replicas)
        # A job that was started with the permutation of an earlier version keeps it.
        first_order = "permutation" if position.step else "index_shuffle"
        order = position.unchanged.get(_ORDER, first_order)
        with fail_together(world):
            return (
                self._train_spec(replicas, position, order),
                self._eval_spec(replicas),
                dataclasses.replace(config, unchanged=self._unchanged(config, order)),
            )

    def _unchanged(self, config: RunConfig, order: Order) -> dict[str, Any]:
        return {
            "source": self.source.fingerprint(),
            "seed": self.seed,
            _ORDER: order,
            **config.unchanged,
        }

    def _train_spec(
        self, replicas: Replicas, position: Position, order: Order
    ) -> TrainSpec:
        sampler = Sampler(
            num_samples=len(self.source),
            global_batch_size=self.global_batch_size,
            seed=self.seed,
            rank=replicas.index,
            size=replicas.size,
            order=order,
        )
        options = dict(self.options.train)
        max_steps = self._max_steps(sampler, options.pop("max_steps", None))
        if self.scale_batch:
            sampler, max_steps = scaled(sampler, max_steps, position)
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

    def _max_steps(self, sampler: Sampler, max_steps: int | None) -> int:
        if (self.epochs is None) == (max_steps is None):
            raise JobError(
                f"Received epochs={self.epochs} and max_steps={max_steps}; expected "
                "one of them."
            )
        return max_steps or sampler.steps(self.epochs or 0)

    def _eval_spec(self, replicas: Replicas) -> EvalSpec:
        return EvalSpec(
            input_fn=lambda: one_pass(
                self.validation,
                rank=replicas.index,
                size=replicas.size,
                local_batch_size=max(1, self.global_batch_size // replicas.size),
                workers=self.workers,
            ),
            **self.options.evaluation,
        )
