"""Trains a classifier of MNIST, or of data of the same form, on one rank or many.

horovodrun -np 4 python -m hvdtrain.mnist
mpirun -np 4 python -m hvdtrain.mnist --model=cnn --epochs=5
python -m hvdtrain.mnist --dataset=digits --model_dir=/tmp/digits
"""

import functools
import math
import sys

from absl import flags

from hvdtrain import data, job, optimizers, program
from hvdtrain.job import JobError, launchers

_DEFAULT_MAX_STEPS = 10_000
_EVALUATION_BATCH_SIZE = 256

_DATASET = flags.DEFINE_enum(
    "dataset", "auto", data.NAMES, "auto is mnist if it can be had, else digits."
)
_DATA_DIR = flags.DEFINE(
    program.Path(),
    "data_dir",
    None,
    "Directory of an npz file or the four IDX files of the data set.",
)
_MODEL = flags.DEFINE_enum("model", "mlp", ("mlp", "cnn"), "The network.")
_MODEL_DIR = flags.DEFINE(
    program.Path(),
    "model_dir",
    None,
    "Where summary.json, model.keras and TensorBoard's logs go.",
)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 64, "Images per rank and step.", lower_bound=1, upper_bound=1 << 20
)
_MAX_STEPS = flags.DEFINE_integer(
    "max_steps",
    None,
    "Steps of one rank: N ranks take max_steps // N. 10000 without --epochs.",
    lower_bound=1,
    upper_bound=1_000_000_000_000,
)
_EPOCHS = flags.DEFINE_integer(
    "epochs",
    None,
    "Passes over the data, instead of --max_steps.",
    lower_bound=1,
    upper_bound=1_000_000,
)
_OPTIMIZER = flags.DEFINE_enum(
    "optimizer", "sgd", list(optimizers.LEARNING_RATES), "The optimizer."
)
_LEARNING_RATE = flags.DEFINE_float(
    "learning_rate",
    None,
    "For one rank: N ranks take N times as much. Without it "
    + ", ".join(f"{name} {rate:g}" for name, rate in optimizers.LEARNING_RATES.items())
    + ".",
)
_WARMUP_EPOCHS = flags.DEFINE_float(
    "warmup_epochs", 0.0, "Epochs of rise from one rank's rate to the job's."
)
_DECAY = flags.DEFINE_enum(
    "decay",
    "none",
    ("none", "cosine"),
    "How the learning rate falls after the warm-up; cosine ends at 0.",
)
_SEED = flags.DEFINE_integer(
    "seed", 0, "Of weights, order and dropout.", lower_bound=0, upper_bound=2**32 - 1
)
_ACCUMULATION_STEPS = flags.DEFINE_integer(
    "accumulation_steps",
    1,
    "Average the gradients of so many steps, then update the weights.",
    lower_bound=1,
    upper_bound=1_000_000,
)
_COMPRESSION = flags.DEFINE_enum(
    "compression", "none", ("none", "fp16", "bf16"), "How gradients travel."
)
_MIXED_PRECISION = flags.DEFINE_enum(
    "mixed_precision",
    "none",
    ("none", "float16", "bfloat16"),
    "The precision that layers compute in.",
)
_EVALUATE_EVERY = flags.DEFINE_integer(
    "evaluate_every", 0, "Epochs; 0 evaluates at the end only.", lower_bound=0
)
_CONSISTENCY_CHECK_STEPS = flags.DEFINE_integer(
    "consistency_check_steps",
    1000,
    "Compare the ranks' weights so often, 0 for never.",
    lower_bound=0,
)
_STEPS_PER_EXECUTION = flags.DEFINE_integer(
    "steps_per_execution",
    0,
    "Steps that TensorFlow takes at a stretch, 0 to choose.",
    lower_bound=0,
    upper_bound=1_000_000,
)


@flags.validator("learning_rate", "expected a positive number")
def _check_learning_rate(rate):
    return rate is None or (rate > 0 and math.isfinite(rate))


@flags.validator("warmup_epochs", "expected a number of epochs, 0 or more")
def _check_warmup_epochs(epochs):
    return epochs >= 0 and math.isfinite(epochs)


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


def main():
    """Trains, evaluates, and writes what came out."""
    world = job.start(seed=_SEED.value)
    from hvdtrain import report, training
    from hvdtrain.job import agreement

    flag_values = program.flag_values()
    agreement.check_same_flags(world, flag_values, but=("data_dir", "model_dir"))

    dataset, warning = _load(world)
    with agreement.fail_together(world):
        train_spec = _train_spec(dataset, world)
        eval_spec = _eval_spec(dataset, world)
        if world.is_chief and _MODEL_DIR.value:
            report.prepare(_MODEL_DIR.value)
        observers = _observers() if world.is_chief else ()
        model = _model(dataset, world)
    facts = report.describe(world) | _facts(dataset, world, train_spec)
    if world.is_chief:
        print(report.banner(facts, dataset, warning=warning), flush=True)
    result = training.train_and_evaluate(
        model,
        train_spec,
        eval_spec,
        world=world,
        observers=observers,
    )
    with agreement.fail_together(world):
        if world.is_chief:
            _finish(result, report.summarize(result, facts))


def _load(world):
    """Return the data set, and a warning if it is not what the user hoped for."""
    from hvdtrain.data import loading

    return loading.load_everywhere(world, _DATASET.value, data_dir=_DATA_DIR.value)


def _train_spec(dataset, world):
    from hvdtrain import training
    from hvdtrain.data import streams

    shard = data.Shard(
        num_samples=len(dataset.x_train),
        global_batch_size=_BATCH_SIZE.value * world.size,
        seed=_SEED.value,
        rank=world.rank,
        size=world.size,
    )
    steps = _steps(shard)
    _check_warmup(_EPOCHS.value or steps * shard.global_batch_size / shard.num_samples)
    return training.TrainSpec(
        input_fn=lambda start_step, end_step: streams.train_batches(
            dataset.x_train,
            dataset.y_train,
            shard=shard,
            start_step=start_step,
            end_step=end_step,
        ),
        max_steps=steps,
        epoch_steps=shard.steps(1),
        local_batch_size=shard.local_batch_size,
        callbacks=functools.partial(_callbacks, world, shard.steps(1)),
        steps_per_execution=_STEPS_PER_EXECUTION.value or None,
    )


def _callbacks(world, pass_steps, plan):
    from hvdtrain import schedules
    from hvdtrain.keras import callbacks

    found = schedules.schedule(
        _local_learning_rate() * world.size,
        # Callbacks count the epochs of fit, which are not quite passes over the data.
        warmup_epochs=_WARMUP_EPOCHS.value * pass_steps / plan.epoch_steps,
        epochs=plan.max_steps / plan.epoch_steps,
        decay=_DECAY.value,
    )
    if _CONSISTENCY_CHECK_STEPS.value:
        every_steps = _CONSISTENCY_CHECK_STEPS.value
        found.append(callbacks.ConsistencyCheckCallback(every_steps))
    return found


def _eval_spec(dataset, world):
    from hvdtrain import training
    from hvdtrain.data import streams

    batches = streams.evaluation_batches(
        dataset.x_test,
        dataset.y_test,
        rank=world.rank,
        size=world.size,
        local_batch_size=_EVALUATION_BATCH_SIZE,
    )
    return training.EvalSpec(
        input_fn=lambda: batches, every_epochs=_EVALUATE_EVERY.value
    )


def _steps(shard):
    """Return the number of batches of each rank: whole accumulation windows."""
    window = _ACCUMULATION_STEPS.value
    if _EPOCHS.value:
        steps = shard.steps(_EPOCHS.value)
        if window > steps:
            raise JobError(
                f"Received --accumulation_steps={window} for a run of {steps} steps; "
                "expected no more than these, for one update of the weights."
            )
        return math.ceil(steps / window) * window
    max_steps = _MAX_STEPS.value or _DEFAULT_MAX_STEPS
    steps = max_steps // (shard.size * window) * window
    if not steps:
        raise JobError(
            f"Received --max_steps={max_steps} for {shard.size} ranks with "
            f"--accumulation_steps={window}; expected {shard.size * window} or more, "
            "for one update of the weights."
        )
    return steps


def _check_warmup(epochs):
    if _WARMUP_EPOCHS.value > epochs:
        raise JobError(
            f"Received --warmup_epochs={_WARMUP_EPOCHS.value:g} for a run of "
            f"{epochs:.3g} epochs; expected no more than these: the learning rate "
            "would never reach its full size."
        )


def _model(dataset, world):
    import keras

    import hvdtrain.keras as hvd
    from hvdtrain import models

    if _MIXED_PRECISION.value != "none":
        keras.mixed_precision.set_global_policy(f"mixed_{_MIXED_PRECISION.value}")
    build = models.BY_NAME[_MODEL.value]
    model = build(dataset.image_shape, num_classes=dataset.num_classes)
    model.compile(
        hvd.DistributedOptimizer(
            optimizers.make(
                _OPTIMIZER.value,
                learning_rate=_local_learning_rate() * world.size,
                accumulation_steps=_ACCUMULATION_STEPS.value,
            ),
            compression=getattr(hvd.Compression, _COMPRESSION.value),
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        jit_compile=False,
    )
    return model


def _local_learning_rate():
    return _LEARNING_RATE.value or optimizers.LEARNING_RATES[_OPTIMIZER.value]


def _facts(dataset, world, train_spec):
    """Return what was asked for, as it goes into the summary."""
    window = _ACCUMULATION_STEPS.value
    return {
        "dataset": dataset.name,
        "requested_dataset": _DATASET.value,
        "model": _MODEL.value,
        "optimizer": _OPTIMIZER.value,
        "local_batch_size": _BATCH_SIZE.value,
        "accumulation_steps": window,
        "global_batch_size": _BATCH_SIZE.value * world.size * window,
        "steps": train_spec.max_steps // window,
        "local_learning_rate": _local_learning_rate(),
        "learning_rate": _local_learning_rate() * world.size,
        "seed": _SEED.value,
        "flags": program.flag_values(),
    }


def _observers():
    from hvdtrain import observers

    # Launchers put a pseudo terminal before what may be a file: no bar there.
    has_bar = sys.stdout.isatty() and not launchers.launch().launcher
    found = [observers.Console(sys.stdout, has_bar=has_bar)]
    if _MODEL_DIR.value:
        found.append(observers.EventLog(_MODEL_DIR.value))
    return found


def _finish(result, summary):
    from hvdtrain import report

    print(
        f"test accuracy {summary['test_accuracy']:.4f} after "
        f"{summary['train_seconds']:.1f} s of training at "
        f"{summary['samples_per_second']:,.0f} samples/s",
        flush=True,
    )
    if _MODEL_DIR.value:
        report.write(_MODEL_DIR.value, model=result.model, summary=summary)
        print(f"written to {_MODEL_DIR.value}", flush=True)


if __name__ == "__main__":
    program.run(main, page=__doc__)
