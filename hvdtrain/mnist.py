"""Trains a classifier of MNIST, or of data of the same form, on one rank or many.

horovodrun -np 4 python -m hvdtrain.mnist
mpirun -np 4 python -m hvdtrain.mnist --model=cnn --epochs=5
python -m hvdtrain.mnist --dataset=digits --model_dir=/tmp/digits
"""

import functools
import math
import os

from absl import flags

from hvdtrain import data, job, program
from hvdtrain.classifier.options import Options
from hvdtrain.job import launchers
from hvdtrain.job.files import check_output
from hvdtrain.job.world import MeshShape, SharedJobError
from hvdtrain.optimizers import LEARNING_RATES

_RATES = ", ".join(f"{name} {rate:g}" for name, rate in LEARNING_RATES.items())

_EXPORTS = ("best", "latest", "final")


def _integer(name, default, text, *, low=1, high=1_000_000):
    flags.DEFINE_integer(name, default, text, lower_bound=low, upper_bound=high)


def _path(name, text):
    flags.DEFINE(program.Path(), name, None, text)


class _Interval(flags.ArgumentParser):
    """Parser of two steps."""

    syntactic_help = "two steps, such as 100,120"

    def parse(self, argument):
        """Return two integers."""
        first, _, last = argument.partition(",")
        if first.isdecimal() and last.isdecimal() and int(first) < int(last):
            return int(first), int(last)
        raise ValueError(f"expected {self.syntactic_help}")


# Each is a field of `classifier.options.Options`.
flags.DEFINE_enum("dataset", "auto", data.NAMES, "auto is mnist, or else digits.")
_path("data_dir", "Directory of an npz file or the four IDX files of the data set.")
flags.DEFINE_enum("model", "mlp", ("mlp", "cnn"), "The network.")
_path(
    "model_dir",
    "Where checkpoints, summary.json, model.keras, log.jsonl and TensorBoard's logs "
    "go. A job that was stopped or killed continues from its checkpoints there.",
)
_integer(
    "save_every_steps", 0, "Steps between checkpoints, 0 for none.", low=0, high=None
)
flags.DEFINE_float(
    "save_every_seconds", 600.0, "Seconds between checkpoints, 0 for none.", 0
)
_integer("keep_checkpoints", 5, "Newest checkpoints that are kept.")
flags.DEFINE_boolean(
    "skip_nonfinite",
    False,
    "Leave out updates whose gradients are not finite, and count them. By default a "
    "loss that is not finite ends the job.",
)
flags.DEFINE_float(
    "max_minutes",
    0.0,
    "Stop after so many minutes with exit code 75, to be continued; 0 for no limit.",
    0,
)
_integer(
    "commit_every_steps",
    0,
    "In an elastic job, steps between copies into memory, from which it continues "
    "when a worker is lost. There is one every 5 seconds as well.",
    low=0,
    high=None,
)
_integer("batch_size", 64, "Images per rank and step.", high=1 << 20)
_integer(
    "max_steps",
    None,
    "Steps of one rank: N ranks take max_steps // N. 10000 without --epochs.",
    high=1_000_000_000_000,
)
_integer("epochs", None, "Passes over the data, instead of --max_steps.")
flags.DEFINE_enum("optimizer", "sgd", list(LEARNING_RATES), "The optimizer.")
flags.DEFINE_float(
    "learning_rate",
    None,
    f"For one rank: N ranks take N times as much. Without it {_RATES}.",
)
flags.DEFINE_float(
    "warmup_epochs", 0.0, "Epochs of rise from one rank's rate to the job's."
)
flags.DEFINE_enum(
    "decay",
    "none",
    ("none", "cosine"),
    "How the learning rate falls after the warm-up; cosine ends at 0.",
)
_integer("seed", 0, "Of weights, order and dropout.", low=0, high=2**32 - 1)
_integer(
    "accumulation_steps",
    1,
    "Average the gradients of so many steps, then update the weights.",
)
_integer(
    "model_parallel",
    1,
    "Ranks among which each dense layer is divided. Together they are one replica, "
    "and read the same images.",
)
_integer(
    "pipeline_stages",
    1,
    "Ranks among which the layers of the model are divided, in their order.",
)
_integer("microbatches", 4, "Parts of a batch, with which the stages work at once.")
flags.DEFINE_enum(
    "pipeline_schedule",
    "1f1b",
    ("gpipe", "1f1b"),
    "1f1b keeps the activations of fewer micro-batches.",
)
flags.DEFINE_bool(
    "shard_optimizer_state",
    False,
    "Each rank keeps the optimizer's state for its part of the weights only.",
)
flags.DEFINE_bool(
    "scale_batch",
    False,
    "When the number of ranks changes, each keeps its batch: the global batch and the "
    "learning rate follow. Without it they stay, and each rank's batch changes.",
)
flags.DEFINE_enum(
    "compression", "none", ("none", "fp16", "bf16"), "Precision of reduced gradients."
)
flags.DEFINE_enum(
    "mixed_precision",
    "none",
    ("none", "float16", "bfloat16"),
    "The precision that layers compute in.",
)
_integer("evaluate_every", 0, "Epochs; 0 evaluates at the end only.", low=0, high=None)
flags.DEFINE_list(
    "export",
    None,
    "SavedModels in MODEL_DIR/export, of evaluations: best (lowest test loss), latest, "
    "final, or several of them with commas.",
)
_integer(
    "consistency_check_steps",
    1000,
    "Steps between comparisons of the ranks' weights, 0 for none.",
    low=0,
    high=None,
)
_integer(
    "steps_per_execution",
    0,
    "Steps between two calls of callbacks, 0 for a default.",
    low=0,
)


flags.DEFINE(
    _Interval(),
    "profile_steps",
    None,
    "A,B: TensorFlow's profiler runs on rank 0 from global step A to B, rounded to "
    "whole executions, and writes to --model_dir for TensorBoard.",
)
_path(
    # horovodrun refuses --timeline, as an abbreviation of two flags of its own.
    "timeline_file",
    "File for Horovod's timeline, as JSON for chrome://tracing. Gradients are then "
    "reduced by Horovod, unless HVDTRAIN_REDUCTION is set.",
)


@flags.validator("learning_rate", "expected a positive number")
def _check_learning_rate(rate):
    return rate is None or (rate > 0 and math.isfinite(rate))


@flags.validator("warmup_epochs", "expected a number of epochs, 0 or more")
def _check_warmup_epochs(epochs):
    return epochs >= 0 and math.isfinite(epochs)


@flags.multi_flags_validator(
    ["save_every_seconds", "max_minutes"], "expected finite numbers"
)
def _check_times(values):
    return all(map(math.isfinite, values.values()))


@flags.validator("export", f"expected some of {', '.join(_EXPORTS)}, each once")
def _check_export(names):
    return names is None or (
        bool(names) and sorted({*names} & {*_EXPORTS}) == sorted(names)
    )


@flags.multi_flags_validator(
    ["export", "save_every_steps", "max_minutes", "model_dir"],
    "--export, --save_every_steps and --max_minutes need --model_dir: exports and "
    "checkpoints are written there",
)
def _check_model_dir(values):
    return bool(values.pop("model_dir")) or not any(values.values())


@flags.multi_flags_validator(
    ["export", "model_parallel", "pipeline_stages"],
    "--export needs a model that is whole: export the dense model.keras in one process",
)
def _check_exported(values):
    return not values.pop("export") or set(values.values()) == {1}


@flags.multi_flags_validator(
    ["max_steps", "epochs"], "expected one of them: each says how long to train"
)
def _check_length(values):
    return values["max_steps"] is None or values["epochs"] is None


@flags.multi_flags_validator(
    ["dataset", "data_dir"],
    "custom needs --data_dir, digits and synthetic take none",
)
def _check_data_dir(values):
    if values["dataset"] == "custom":
        return bool(values["data_dir"])
    return values["dataset"] not in ("digits", "synthetic") or not values["data_dir"]


@flags.multi_flags_validator(
    ["profile_steps", "model_dir"], "expected a --model_dir for --profile_steps"
)
def _check_profile(values):
    return not values["profile_steps"] or bool(values["model_dir"])


def main():
    """Trains, evaluates, and writes the model and the summary."""
    # Before `start` imports TensorFlow, which defines flags of its own.
    values = program.flag_values()
    if values["timeline_file"]:
        _record_timeline(values["timeline_file"])
    shape = MeshShape(
        model=values["model_parallel"], pipeline=values["pipeline_stages"]
    )
    world = job.start(seed=values["seed"], mesh=shape)
    # Not at the top: TensorFlow and Horovod read their environment at the import, and
    # `start` sets it.
    from hvdtrain.classifier import run

    run.train(
        Options(**values), world, shape, report=functools.partial(print, flush=True)
    )


def _record_timeline(path):
    """Make Horovod, which is not started yet, write its timeline until it ends."""
    launched = launchers.launch()
    if launched.size == 1:
        raise SharedJobError(
            "Received --timeline_file in a job of 1 rank, which moves nothing; "
            "expected 2 or more: start it by horovodrun -np 2 or mpirun -np 2."
        )
    if launched.rank == 0:
        check_output(path, "timeline_file")
    os.environ["HOROVOD_TIMELINE"] = path
    # A reduction in shared memory is not in the timeline.
    os.environ.setdefault("HVDTRAIN_REDUCTION", "horovod")


if __name__ == "__main__":
    program.run(main, page=__doc__)
