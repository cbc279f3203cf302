"""The TensorFlow operations that are compiled from the sources in this directory.

`python -m hvdtrain.install` installs them as a package of their own. Callers fall back
to Horovod's operations where it is not installed.
"""

import ctypes
import dataclasses
import functools
import pathlib
from types import ModuleType

import tensorflow as tf

from hvdtrain.install import record, supported

# Version of the operations, of the C functions, and of what ranks send to each other;
# interface.cc has the same number.
INTERFACE = 17
_REMEDY = "python -m hvdtrain.install"


@dataclasses.dataclass(frozen=True)
class Library:
    """The loaded library: its TensorFlow operations and its C functions."""

    operations: ModuleType
    functions: ctypes.CDLL


def library_path() -> pathlib.Path:
    """Return the path of the library that is installed for this TensorFlow.

    TensorFlow has no stable ABI: loading a library that was compiled for another line
    of versions may end the process, so the package's record is read first.

    Raises:
        OSError: no library is installed, or it was built for another TensorFlow.
    """
    package = record.find_package(record.NATIVE)
    built = record.read(package) if package else None
    if package is None or built is None:
        raise OSError(f"The package {record.NATIVE} is missing: {_REMEDY}")
    if supported.minor(built.tensorflow) != supported.minor(tf.__version__):
        raise OSError(
            f"{package} was built for TensorFlow {built.tensorflow}, and "
            f"{tf.__version__} is installed: {_REMEDY}"
        )
    return package / record.NATIVE_LIBRARY


@functools.cache
def load() -> Library:
    """Return the loaded library.

    Raises:
        OSError: it is missing, it cannot be loaded, or it has another version.
    """
    path = library_path()
    try:
        # Before ctypes: TensorFlow finds the operations that are registered while it
        # loads the library, and a library is loaded once in a process.
        operations = tf.load_op_library(str(path))
    except tf.errors.OpError as error:
        raise OSError(f"{path}: {error.message}") from None
    functions = ctypes.CDLL(str(path))
    interface = getattr(functions, "hvdtrain_interface", lambda: None)
    if interface() != INTERFACE:
        raise OSError(f"{path} is of another version of hvdtrain: {_REMEDY}")
    return Library(operations, functions)
