"""A training in which rank 1 is slow: see test_hangs.py.

horovodrun -np 2 python tests/commands/slow_program.py --reason=sleep --model_dir=DIR
"""

import os
import pathlib
import time

import numpy as np
from absl import flags

from hvdtrain import job, program

_REASON = flags.DEFINE_enum("reason", "sleep", ("sleep", "input", "throttling"), "Why.")
_GROUP = flags.DEFINE_string("group", None, "Control group with a CPU quota.")
_MODEL_DIR = flags.DEFINE_string("model_dir", None, "Where log.jsonl is.")
_STEPS = 150
_SECONDS = 0.02


def main():
    world = job.start()
    import keras
    import tensorflow as tf

    from hvdtrain import training
    from hvdtrain.log import JsonLog

    is_slow = world.rank == 1

    class Slow(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if is_slow and _REASON.value == "sleep":
                time.sleep(_SECONDS)

        def on_train_begin(self, logs=None):
            if is_slow and _REASON.value == "throttling":
                # All threads of the process.
                procs = pathlib.Path(_GROUP.value, "cgroup.procs")
                procs.write_text(str(os.getpid()))

    def load(step):
        if is_slow and _REASON.value == "input":
            time.sleep(_SECONDS)
        return np.full((64, 256), 0.1 * (step % 7), "float32")

    def batches(start, end):
        def pair(step):
            x = tf.numpy_function(load, [step], tf.float32)
            x = tf.ensure_shape(x, (64, 256))
            return x, x[:, :1]

        return tf.data.Dataset.range(start, end).map(pair)

    def model_fn():
        layers = [keras.layers.Dense(1024), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((256,)), *layers])
        model.compile(keras.optimizers.SGD(1e-4), "mse")
        return model

    observers = [JsonLog(_MODEL_DIR.value, warn=print)] if world.is_chief else []
    training.train_and_evaluate(
        model_fn,
        training.TrainSpec(
            input_fn=batches,
            max_steps=_STEPS,
            pass_steps=_STEPS,
            local_batch_size=64,
            steps_per_execution=1,
            callbacks=lambda plan: [Slow()],
        ),
        training.EvalSpec(input_fn=None),
        training.RunConfig(),
        world=world,
        observers=observers,
    )


if __name__ == "__main__":
    program.run(main, page=__doc__)
