"""Horovod training on Keras 3, where N ranks compute what the N-times batch does.

`hvdtrain.keras` is the drop-in for `horovod.tensorflow.keras`. Importing `hvdtrain`
itself loads no TensorFlow.
"""

from hvdtrain import renamed

__version__ = "0.1.0"

renamed.install()
