"""Samples of two classes, their batches for `TrainSpec.input_fn`, a start of a run."""

import numpy as np
import tensorflow as tf

from hvdtrain.events import RunStart

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


def start(step, *, ranks=2):
    return RunStart(
        step=step,
        max_steps=100,
        ranks=ranks,
        global_batch_size=8,
        local_batch_sizes=[8 // ranks] * ranks,
        accumulation_steps=1,
        learning_rate=0.5,
        model="mlp",
        optimizer="sgd",
        mesh={"data": ranks, "pipeline": 1, "model": 1},
        reduction="shared memory",
        controller="Gloo",
        hosts=["node1"] * ranks,
        threads=[1] * ranks,
        versions={"Keras": "3"},
        process_seconds=4.5,
    )
