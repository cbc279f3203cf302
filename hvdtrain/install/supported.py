"""The versions of TensorFlow, Keras and Python that hvdtrain supports.

setup.cfg has the same ranges.
"""

# Lines of TensorFlow, each of which has its own ABI: the oldest first.
TENSORFLOW = ((2, 18), (2, 19), (2, 20), (2, 21))
# Packages whose module is `tensorflow`: they overwrite each other's files.
TENSORFLOW_PACKAGES = ("tensorflow", "tensorflow-cpu", "tf-nightly", "tf-nightly-cpu")
# The first and the last.
KERAS = ((3, 12), (3, 15))
PYTHON = ((3, 11), (3, 13))


def text(version: tuple[int, ...]) -> str:
    """Return a version as it is written: (2, 21) is "2.21"."""
    return ".".join(map(str, version))


def minor(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version: those of "2.21.0" are (2, 21)."""
    first, second = version.split(".")[:2]
    return int(first), int(second)
