"""A training in which one rank fails: see test_faults.py.

horovodrun -np 2 python tests/commands/faulty_program.py --fault=stop --on_rank=1
"""

import os
import signal
import subprocess
import threading
import time

import numpy as np
from absl import flags

from hvdtrain import job, program

_FAULT = flags.DEFINE_enum(
    "fault", "raise", ("raise", "kill", "exit", "stop", "hang"), "What happens."
)
_PHASE = flags.DEFINE_enum("phase", "step", ("step", "save", "evaluate"), "When.")
_STEP = flags.DEFINE_integer("step", 25, "The step before which it happens.")
_ON_RANK = flags.DEFINE_integer("on_rank", 0, "Where.")
_MODEL_DIR = flags.DEFINE_string("model_dir", None, "Checkpoints.")
# A checkpoint of so many weights takes about as long as the steps between two.
_UNITS = 3000


def _start_programs():
    """Start what a rank must not leave: programs, and a busy fork of itself."""
    subprocess.Popen(["sleep", "3600"])
    subprocess.Popen(["sleep", "3600"], start_new_session=True)
    # Its parent ends at once.
    subprocess.run(["sh", "-c", "setsid sleep 3600 &"], check=True)
    if os.fork() == 0:
        os.nice(19)
        while True:
            pass


def _fail():
    _start_programs()
    # The time, for the test.
    print(f"fault at {time.time():.2f}", flush=True)
    if _FAULT.value == "raise":
        raise KeyError("a bug on purpose")
    if _FAULT.value == "exit":
        os._exit(3)
    if _FAULT.value == "hang":
        threading.Event().wait()
    number = signal.SIGKILL if _FAULT.value == "kill" else signal.SIGSTOP
    os.kill(os.getpid(), number)


def main():
    world = job.start()
    import keras
    import tensorflow as tf

    from hvdtrain import training

    is_here = world.rank == _ON_RANK.value
    phase = _PHASE.value

    def model_fn():
        units = _UNITS if phase == "save" else 8
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(units), keras.layers.Dense(1)]
        )
        model.compile(keras.optimizers.Adam(0.001), "mse")
        return model

    def batches(start, end, fails_at=None):
        def load(step):
            if is_here and step == fails_at:
                _fail()
            return np.full((8, 4), 0.1 * (step % 7), "float32")

        def pair(step):
            x = tf.ensure_shape(tf.numpy_function(load, [step], tf.float32), (8, 4))
            return x, x[:, :1]

        return tf.data.Dataset.range(start, end).map(pair)

    class Fault(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if int(self.model.optimizer.iterations) == _STEP.value:
                _fail()

    # In the input where it hangs, since that is where ranks do.
    in_input = phase == "step" and _FAULT.value == "hang"
    in_callback = is_here and phase != "evaluate" and not in_input
    training.train_and_evaluate(
        model_fn,
        training.TrainSpec(
            input_fn=lambda start, end: batches(
                start, end, _STEP.value if in_input else None
            ),
            max_steps=1000,
            pass_steps=100,
            local_batch_size=8,
            steps_per_execution=1,
            callbacks=lambda plan: [Fault()] if in_callback else [],
        ),
        training.EvalSpec(
            input_fn=lambda: batches(0, 9, 5 if phase == "evaluate" else None),
            throttle_steps=_STEP.value,
        ),
        training.RunConfig(
            model_dir=_MODEL_DIR.value,
            save_every_steps=1 if phase == "save" else 10,
        ),
        world=world,
    )


if __name__ == "__main__":
    program.run(main, page=__doc__)
