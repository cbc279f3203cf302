"""`keras.distribution` on TensorFlow, over the ranks of a Horovod job.

A script that is written for Keras on JAX runs on TensorFlow after one call:

    import hvdtrain.distribution

    hvdtrain.distribution.enable()
    keras.distribution.initialize()
    keras.distribution.set_distribution(keras.distribution.DataParallel())

Importing this package replaces nothing.
"""

from hvdtrain.distribution.devices import layout_of
from hvdtrain.distribution.enabling import enable

__all__ = ["enable", "layout_of"]
