"""The options of a training of an image classifier: the flags of `hvdtrain.mnist`.

Importing this module loads no TensorFlow.
"""

import dataclasses
import math
from collections.abc import Sequence

from absl import flags

from hvdtrain import data
from hvdtrain.flag_fields import FlagCheck, flag_field, path_field
from hvdtrain.job.world import MeshShape
from hvdtrain.optimizers import LEARNING_RATES

_RATES = ", ".join(f"{name} {rate:g}" for name, rate in LEARNING_RATES.items())
_EXPORTS = ("best", "latest", "final")


class _IntervalParser(flags.ArgumentParser):
    """Parser of two steps."""

    syntactic_help = "two steps, such as 100,120"

    def parse(self, argument: str) -> tuple[int, int]:
        first, _, last = argument.partition(",")
        if first.isdecimal() and last.isdecimal() and int(first) < int(last):
            return int(first), int(last)
        raise ValueError(f"expected {self.syntactic_help}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifierOptions:
    """The options of a training. The fields are flags: `--help` describes them."""

    dataset: str = flag_field(
        "auto", "auto is mnist, or else digits.", choices=data.NAMES
    )
    data_dir: str | None = path_field(
        "Directory of an npz file or the four IDX files of the data set."
    )
    model: str = flag_field("mlp", "The network.", choices=("mlp", "cnn"))
    model_dir: str | None = path_field(
        "Where checkpoints, summary.json, model.keras, log.jsonl and TensorBoard's "
        "logs go; also an address, such as s3://bucket/run. A job that was stopped or "
        "killed continues from its checkpoints there.",
        accepts_addresses=True,
    )
    save_every_steps: int = flag_field(
        0, "Steps between checkpoints, 0 for none.", low=0
    )
    save_every_seconds: float = flag_field(
        600.0, "Seconds between checkpoints, 0 for none.", low=0
    )
    keep_checkpoints: int = flag_field(
        5, "Newest checkpoints that are kept.", low=1, high=1_000_000
    )
    skip_nonfinite: bool = flag_field(
        False,
        "Leave out updates whose gradients are not finite, and count them. By default "
        "a loss that is not finite ends the job.",
    )
    max_minutes: float = flag_field(
        0.0,
        "Stop after so many minutes with exit code 75, to be continued; 0 for no "
        "limit.",
        low=0,
    )
    commit_every_steps: int = flag_field(
        0,
        "In an elastic job, steps between copies into memory, from which it continues "
        "when a worker is lost. There is one every 5 seconds as well.",
        low=0,
    )
    batch_size: int = flag_field(64, "Images per rank and step.", low=1, high=1 << 20)
    max_steps: int | None = flag_field(
        None,
        "Steps of one rank: N ranks, or N replicas of a sharded model, take "
        "max_steps // N. 10000 without --epochs.",
        low=1,
        high=1_000_000_000_000,
    )
    epochs: int | None = flag_field(
        None, "Passes over the data, instead of --max_steps.", low=1, high=1_000_000
    )
    optimizer: str = flag_field("sgd", "The optimizer.", choices=LEARNING_RATES)
    learning_rate: float | None = flag_field(
        None, f"For one rank: N ranks take N times as much. Without it {_RATES}."
    )
    warmup_epochs: float = flag_field(
        0.0, "Epochs of rise from one rank's rate to the job's."
    )
    decay: str = flag_field(
        "none",
        "How the learning rate falls after the warm-up; cosine ends at 0.",
        choices=("none", "cosine"),
    )
    seed: int = flag_field(0, "Of weights, order and dropout.", low=0, high=2**32 - 1)
    accumulation_steps: int = flag_field(
        1,
        "Average the gradients of so many steps, then update the weights.",
        low=1,
        high=1_000_000,
    )
    model_parallel: int = flag_field(
        1,
        "Ranks over which each dense layer is sharded. Together they are one replica, "
        "and read the same images.",
        low=1,
        high=1_000_000,
    )
    pipeline_stages: int = flag_field(
        1,
        "Stages of the model, one on each rank: consecutive layers.",
        low=1,
        high=1_000_000,
    )
    microbatches: int = flag_field(
        4,
        "Micro-batches of a batch, with which the stages work at once.",
        low=1,
        high=1_000_000,
    )
    pipeline_schedule: str = flag_field(
        "1f1b",
        "1f1b keeps the activations of fewer micro-batches.",
        choices=("gpipe", "1f1b"),
    )
    shard_optimizer_state: bool = flag_field(
        False,
        "Each rank keeps the optimizer's state for its shard of the weights only.",
    )
    scale_batch: bool = flag_field(
        False,
        "When the number of ranks changes, each keeps its batch: the global batch and "
        "the learning rate follow. Without it they stay, and each rank's batch "
        "changes.",
    )
    compression: str = flag_field(
        "none", "Precision of reduced gradients.", choices=("none", "fp16", "bf16")
    )
    mixed_precision: str = flag_field(
        "none",
        "The precision that layers compute in.",
        choices=("none", "float16", "bfloat16"),
    )
    evaluate_every: int = flag_field(0, "Epochs; 0 evaluates at the end only.", low=0)
    export: Sequence[str] | None = flag_field(
        None,
        "SavedModels in MODEL_DIR/export, of evaluations: best (lowest test loss), "
        "latest, final, or several of them with commas.",
    )
    consistency_check_steps: int = flag_field(
        1000, "Steps between comparisons of the ranks' weights, 0 for none.", low=0
    )
    steps_per_execution: int = flag_field(
        0,
        "Steps between two calls of callbacks, 0 for a default.",
        low=0,
        high=1_000_000,
    )
    profile_steps: tuple[int, int] | None = flag_field(
        None,
        "A,B: TensorFlow's profiler runs on rank 0 from global step A to B, rounded to "
        "full executions, and writes to --model_dir for TensorBoard.",
        parser=_IntervalParser(),
    )
    # horovodrun refuses --timeline, as an abbreviation of two flags of its own.
    timeline_file: str | None = path_field(
        "File for Horovod's timeline, as JSON for chrome://tracing. Gradients are then "
        "reduced by Horovod, unless HVDTRAIN_REDUCTION is set."
    )

    @property
    def local_learning_rate(self) -> float:
        """The learning rate for one rank."""
        return self.learning_rate or LEARNING_RATES[self.optimizer]

    @property
    def mesh_shape(self) -> MeshShape:
        """The ranks over which a model is sharded."""
        return MeshShape(model=self.model_parallel, pipeline=self.pipeline_stages)


def _is_choice_of_exports(export: Sequence[str] | None) -> bool:
    return export is None or (
        bool(export) and sorted({*export} & {*_EXPORTS}) == sorted(export)
    )


def _has_model_dir(
    export: Sequence[str] | None,
    save_every_steps: int,
    max_minutes: float,
    model_dir: str | None,
) -> bool:
    return bool(model_dir) or not (export or save_every_steps or max_minutes)


def _has_data_dir(dataset: str, data_dir: str | None) -> bool:
    if dataset == "custom":
        return bool(data_dir)
    return dataset not in ("digits", "synthetic") or not data_dir


# What the bounds of single fields do not express. absl's bounds accept nan and inf.
CHECKS = (
    FlagCheck(
        lambda learning_rate: learning_rate is None or 0 < learning_rate < math.inf,
        "expected a positive number",
    ),
    FlagCheck(
        lambda warmup_epochs: 0 <= warmup_epochs < math.inf,
        "expected a number of epochs, 0 or more",
    ),
    FlagCheck(
        lambda save_every_seconds, max_minutes: (
            math.isfinite(save_every_seconds) and math.isfinite(max_minutes)
        ),
        "expected finite numbers",
    ),
    FlagCheck(
        _is_choice_of_exports, f"expected some of {', '.join(_EXPORTS)}, each once"
    ),
    FlagCheck(
        _has_model_dir,
        "--export, --save_every_steps and --max_minutes need --model_dir: exports and "
        "checkpoints are written there",
    ),
    FlagCheck(
        lambda export, model_parallel, pipeline_stages: (
            not export or model_parallel == pipeline_stages == 1
        ),
        "--export needs a model that is not sharded: export the full model.keras in "
        "one process",
    ),
    FlagCheck(
        lambda max_steps, epochs: max_steps is None or epochs is None,
        "expected one of them: each says how long to train",
    ),
    FlagCheck(_has_data_dir, "custom needs --data_dir, digits and synthetic take none"),
    FlagCheck(
        lambda profile_steps, model_dir: not profile_steps or bool(model_dir),
        "expected a --model_dir for --profile_steps",
    ),
)
