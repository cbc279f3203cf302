"""The states of the global random generators of this process, as arrays.

Those of Python's `random`, of `numpy.random`, and of `keras.random` without a seed.
Operations such as `tf.random.normal` keep theirs in TensorFlow's runtime, which does
not return it.
"""

import math
import random

import numpy as np
from keras.src.backend.common import global_state
from keras.src.random import seed_generator

_MERSENNE_TWISTER = "MT19937"
# Keras 3.12 has no constant for it.
_KERAS_GENERATOR = "global_seed_generator"


def capture():
    """Return arrays by name."""
    version, words, gauss = random.getstate()
    arrays = {
        "python": np.array([version, *words], "uint64"),
        "python_gauss": np.array([math.nan if gauss is None else gauss]),
    }
    # Keras makes its generator when it is first used, by a draw of Python's.
    of_keras = global_state.get_global_attribute(_KERAS_GENERATOR)
    if of_keras is not None:
        arrays["keras"] = of_keras.state.numpy()
    of_numpy = np.random.get_state(legacy=False)
    # A program may have chosen another one by `numpy.random.set_bit_generator`.
    if of_numpy["bit_generator"] == _MERSENNE_TWISTER:
        words, position = of_numpy["state"]["key"], of_numpy["state"]["pos"]
        arrays["numpy"] = words
        arrays["numpy_position"] = np.array([position, of_numpy["has_gauss"]])
        arrays["numpy_gauss"] = np.array([of_numpy["gauss"]])
    return arrays


def restore(arrays):
    """Set the generators to the states that `capture` has returned."""
    if "keras" in arrays:
        seed_generator.global_seed_generator().state.assign(arrays["keras"])
    # After the generator of Keras, which may have drawn from this one.
    version, *words = arrays["python"].tolist()
    gauss = arrays["python_gauss"].item()
    random.setstate((version, tuple(words), None if math.isnan(gauss) else gauss))
    if "numpy" in arrays:
        position, has_gauss = arrays["numpy_position"].tolist()
        gauss = arrays["numpy_gauss"].item()
        np.random.set_state(
            (_MERSENNE_TWISTER, arrays["numpy"], position, has_gauss, gauss)
        )
