"""`training.adapt` in one process, without Horovod."""

import keras
import numpy as np
import pytest

from hvdtrain import training
from hvdtrain.job import JobError, World

WORDS = np.array(["b a", "c", "a c", "b d"], object)
VALUES = np.array([[1, 10], [2, 20], [4, 0]], "float32")


def test_words_are_ordered_as_by_keras():
    layer = keras.layers.TextVectorization(max_tokens=5, output_mode="tf_idf")
    training.adapt(layer, WORDS, world=World(), local_batch_size=3)
    # Of words that are equally frequent, the last in the alphabet is the first.
    assert layer.get_vocabulary() == ["[UNK]", "c", "b", "a", "d"]
    weights = np.log(1 + 4 / (1 + np.array([2, 2, 2, 1])))
    found = layer(np.array(["c b a d"], object))
    np.testing.assert_allclose(found[0, 1:], weights, rtol=1e-6)


def test_moments():
    layer = keras.layers.Normalization()
    training.adapt(layer, VALUES, world=World(), local_batch_size=2)
    np.testing.assert_allclose(layer.adapt_mean, [7 / 3, 10], rtol=1e-6)
    np.testing.assert_allclose(layer.adapt_variance, [14 / 9, 200 / 3], rtol=1e-6)


def test_large_values_lose_no_digits():
    layer = keras.layers.Normalization(axis=None)
    values = 1e6 + np.arange(1000.0)
    training.adapt(layer, values, world=World(), local_batch_size=7)
    np.testing.assert_allclose(layer.adapt_variance, np.var(values), rtol=1e-6)


def test_a_layer_that_failed_is_adapted_without_the_samples_of_the_failure():
    layer = keras.layers.StringLookup()

    def fail_at_the_end(batch):
        if b"b d" in batch.numpy():
            raise ValueError("the end")
        return batch

    with pytest.raises(JobError, match="Cannot adapt: ValueError: the end"):
        training.adapt(
            layer, WORDS, world=World(), select=fail_at_the_end, local_batch_size=1
        )
    training.adapt(layer, WORDS[-1:], world=World())
    assert layer.get_vocabulary() == ["[UNK]", "b d"]


def test_a_bug_has_its_traceback():
    def select(batch):
        return {"city": batch}["country"]

    with pytest.raises(JobError, match=r"in select\n.*\n.*\nKeyError: 'country'"):
        training.adapt(keras.layers.StringLookup(), WORDS, world=World(), select=select)
