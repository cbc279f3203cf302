"""Logs a job to one run of TensorBoard; `tensorboard --logdir=MODEL_DIR` shows it.

`training.make_observers(sys.stdout, model_dir=...)` has such an observer already.
"""

import pathlib

import tensorflow as tf


class Observer:
    """The directory is in `model_dir`: a job that continues logs to it."""

    def __init__(self, model_dir):
        path = pathlib.Path(model_dir, "tensorboard")
        self.writer = tf.summary.create_file_writer(str(path))

    def on_progress(self, progress):
        values = progress.metrics | {"learning_rate": progress.learning_rate}
        self.write("train", progress.step, values)

    def on_evaluation(self, step, metrics):
        self.write("test", step, metrics)

    def write(self, group, step, values):
        with self.writer.as_default(step=step):
            for name, value in values.items():
                tf.summary.scalar(f"{group}/{name}", value)
        self.writer.flush()
