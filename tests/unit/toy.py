"""Samples of two classes, and their batches for `TrainSpec.input_fn`."""

import numpy as np
import tensorflow as tf

BATCH, NUM_SAMPLES = 4, 400
X = np.random.RandomState(0).normal(size=(NUM_SAMPLES, 6)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("int32")


def batches(start_step, end_step, *, num_samples=NUM_SAMPLES):
    """Batches in the order of the samples, over and over."""
    places = np.arange(start_step * BATCH, end_step * BATCH) % num_samples
    pairs = tf.data.Dataset.from_tensor_slices((X[places], Y[places])).batch(BATCH)
    options = tf.data.Options()
    # The end of an iterator waits for the end of a period of it, up to 10 s.
    options.autotune.enabled = False
    return pairs.with_options(options)
