"""What is printed of exceptions in input functions, as TensorFlow raises them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.output import describe


def load(number):
    if number == 2:
        raise KeyError("a bug on purpose")
    return np.ones((8, 4), "float32")


def mapped(function):
    def pair(number):
        x = tf.ensure_shape(function(load, [number], tf.float32), (8, 4))
        return x, x[:, :1]

    return tf.data.Dataset.range(9).map(pair)


def generated():
    spec = tf.TensorSpec((8, 4)), tf.TensorSpec((8, 1))
    pairs = ((load(number), np.ones((8, 1))) for number in range(9))
    return tf.data.Dataset.from_generator(lambda: pairs, output_signature=spec)


@pytest.mark.parametrize(
    "batches",
    [lambda: mapped(tf.numpy_function), lambda: mapped(tf.py_function), generated],
)
@pytest.mark.parametrize("takes", ["fit", "loop"])
def test_an_exception_in_an_input_function_is_the_users(batches, takes):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(tf.errors.OpError) as caught:
        model.fit(batches(), verbose=0) if takes == "fit" else list(batches())
    last_lines, whole = describe(caught.value)
    assert last_lines == "KeyError: 'a bug on purpose'"
    first, *_, second_last, last = [
        line for line in whole.splitlines() if set(line) - set(" ^")
    ]
    assert first == "Traceback (most recent call last):"
    assert second_last == '    raise KeyError("a bug on purpose")'
    assert last == last_lines
    assert whole.count("a bug on purpose") == 2
    assert "tensorflow/python" not in whole


def test_other_exceptions_are_as_python_prints_them():
    try:
        load(2)
    except KeyError as error:
        last_lines, whole = describe(error)
    assert last_lines == "KeyError: 'a bug on purpose'"
    assert whole.startswith("Traceback (most recent call last):\n")
    assert whole.endswith(f"\n{last_lines}")
