"""How `fit` deals the samples of a source to the ranks, from where a job continues."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hvdtrain.data.batching import Transform, batches, one_pass
from hvdtrain.data.sampler import Sampler
from hvdtrain.data.sources.source import Source
from hvdtrain.job import JobError, World
from hvdtrain.job.agreement import check_same, fail_together, gather
from hvdtrain.parallel.replicas import Replicas
from hvdtrain.training import run_directory
from hvdtrain.training.elastic import Commits
from hvdtrain.training.exporting import BestExporter
from hvdtrain.training.inputs import check_source, naming_validation
from hvdtrain.training.specs import EvalSpec, Position, RunConfig, TrainSpec

# A number, or a function of the number of ranks with which the job was first started.
ByRanks = int | Callable[[int], int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DealtSamples:
    """The arguments of `fit` by which samples are dealt to the ranks; see there."""

    source: Source
    validation: Source | None
    global_batch_size: ByRanks
    epochs: int | None
    max_steps: ByRanks | None
    validation_batch_size: int | None
    seed: int
    scale_batch: bool
    transform: Transform | None
    workers: int | None

    def __post_init__(self) -> None:
        for name in ("epochs", "validation_batch_size"):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name))

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
                "epochs": self.epochs,
                "scale_batch": self.scale_batch,
                "seed": self.seed,
                "check_input": is_checked,
            },
        )
        if is_checked:
            check_source(self.source, world)
        position = self._position(world, replicas, config, commits)
        with fail_together(world):
            size = self._global_batch_size(position.original_size)
        check_same(world, {"global_batch_size": size})
        return position

    def _position(
        self,
        world: World,
        replicas: Replicas,
        config: RunConfig,
        commits: Commits | None,
    ) -> Position:
        sizes = (self.global_batch_size, self.max_steps)
        # All ranks read it, or none: it is a collective.
        if any(gather(world, self.scale_batch or any(map(callable, sizes)))):
            return run_directory.position(config, world, commits, replicas=replicas)
        # The numbers do not depend on the first ranks: the checkpoint, which is read
        # and hashed before it is restored, is not needed for them.
        return Position(step=0, sample=0, original_size=replicas.size)

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
            global_batch_size=self._global_batch_size(position.original_size),
            seed=self.seed,
        )
        sampler, max_steps = _deal(
            sampler,
            self._count_steps(sampler, position.original_size),
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
        self,
        replicas: Replicas,
        *,
        local_batch_size: int,
        every_epochs: int | None = None,
        **options: Any,
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
        with naming_validation():
            batches_of_rank = one_pass(
                self.validation,
                rank=replicas.index,
                size=replicas.size,
                local_batch_size=self.validation_batch_size or local_batch_size,
                workers=self.workers,
            )
        return EvalSpec(
            input_fn=lambda: batches_of_rank,
            every_epochs=1 if every_epochs is None else every_epochs,
            **options,
        )

    def _global_batch_size(self, ranks: int) -> int:
        return _of_ranks("global_batch_size", self.global_batch_size, ranks)

    def _count_steps(self, sampler: Sampler, ranks: int) -> int:
        if (self.epochs is None) == (self.max_steps is None):
            raise JobError(
                f"Received epochs={self.epochs} and max_steps={self.max_steps}; "
                "expected one of them."
            )
        if self.max_steps is None:
            return sampler.steps(self.epochs or 0)
        return _of_ranks("max_steps", self.max_steps, ranks)


def _deal(
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


def _check_integer(name: str, value: Any) -> None:
    is_integer = isinstance(value, int | np.integer) and value is not True
    if not (is_integer and value > 0):
        raise JobError(f"Received {name}={value}; expected 1 or more, an integer.")


def _of_ranks(name: str, value: ByRanks, ranks: int) -> int:
    number = value(ranks) if callable(value) else value
    _check_integer(name, number)
    return number
