"""Trains on TFRecord files, and writes the weights of each rank.

remote_program.py FILES DIRECTORY
"""

import pathlib
import sys

from hvdtrain import data, job, training


def main(files, directory):
    world = job.start(seed=1)
    import keras
    import numpy as np
    import tensorflow as tf

    features = {"x": tf.io.FixedLenFeature((4,), tf.float32)}

    def parse(records):
        x = tf.io.parse_example(records, features)["x"]
        return x, tf.reduce_sum(x, axis=1, keepdims=True)

    def make_model():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
        return model

    result = training.fit(
        make_model,
        data.TFRecord(files, parse),
        epochs=2,
        global_batch_size=6,
        world=world,
        seed=1,
        observers=(),
    )
    path = pathlib.Path(directory, f"weights-{world.rank}.npz")
    np.savez(path, *result.model.get_weights())


main(*sys.argv[1:])
