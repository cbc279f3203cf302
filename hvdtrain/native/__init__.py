"""The TensorFlow operations that set-up compiles from the sources in this directory.

`scripts/build_native.sh` builds them as `lib/libhvdtrain.so` of the Python environment.
What uses them has another way where they are not installed.
"""

import ctypes
import dataclasses
import functools
import pathlib
import sys

import tensorflow as tf

# Of the operations and of the C functions; also in interface.cc.
_INTERFACE = 2


@dataclasses.dataclass(frozen=True)
class Library:
    """The loaded library.

    Attributes:
        operations: the TensorFlow operations, each a Python function.
        functions: the C functions, a `ctypes.CDLL`.
    """

    operations: object
    functions: object


def path():
    """Where set-up installs the library."""
    return pathlib.Path(sys.prefix, "lib", "libhvdtrain.so")


@functools.cache
def load():
    """Returns the `Library`.

    Raises:
        OSError: it is missing, or it cannot be loaded, or it is of another version.
    """
    if not path().exists():
        raise OSError(f"{path()} is missing: run scripts/setup.sh")
    try:
        # TensorFlow lists what is registered while it loads the library: before ctypes.
        operations = tf.load_op_library(str(path()))
    except tf.errors.OpError as error:
        raise OSError(f"{path()}: {error.message}") from None
    functions = ctypes.CDLL(str(path()))
    if functions.hvdtrain_interface() != _INTERFACE:
        raise OSError(f"{path()} is of another version: run scripts/setup.sh")
    return Library(operations, functions)
