"""The TensorFlow operations that set-up compiles from the sources in this directory.

`scripts/build_native.sh` builds them as a library in `lib/` of the Python environment.
Callers fall back to Horovod's operations where the library is not installed.
"""

import ctypes
import dataclasses
import functools
import pathlib
import sys
from types import ModuleType

import tensorflow as tf

# Version of the operations and of the C functions; interface.cc has the same number.
_INTERFACE = 9


@dataclasses.dataclass(frozen=True)
class Library:
    """The loaded library: its TensorFlow operations and its C functions."""

    operations: ModuleType
    functions: ctypes.CDLL


def library_path() -> pathlib.Path:
    """Return where set-up installs the library for this TensorFlow.

    TensorFlow has no stable ABI. Loading a library that was compiled for another
    version may end the process, so the version is in the name.
    """
    name = f"libhvdtrain-tensorflow-{tf.__version__}.so"
    return pathlib.Path(sys.prefix, "lib", name)


@functools.cache
def load() -> Library:
    """Return the loaded library.

    Raises:
        OSError: it is missing, it cannot be loaded, or it has another version.
    """
    if not library_path().exists():
        raise OSError(f"{library_path()} is missing: run scripts/setup.sh")
    try:
        # Before ctypes: TensorFlow finds the operations that are registered while it
        # loads the library, and a library is loaded once in a process.
        operations = tf.load_op_library(str(library_path()))
    except tf.errors.OpError as error:
        raise OSError(f"{library_path()}: {error.message}") from None
    functions = ctypes.CDLL(str(library_path()))
    interface = getattr(functions, "hvdtrain_interface", lambda: None)
    if interface() != _INTERFACE:
        raise OSError(f"{library_path()} is of another version: run scripts/setup.sh")
    return Library(operations, functions)
