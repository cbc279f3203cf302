"""Data sets by name: prepared once per node, then loaded on every rank."""

import dataclasses
import os
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np

from hvdtrain.data import formats
from hvdtrain.data.download import cached_mnist, default_cache_dir
from hvdtrain.data.formats import DataError

Directory = str | os.PathLike[str]

NAMES = ("auto", "mnist", "digits", "synthetic", "custom")
_DIGITS = pathlib.Path(__file__).with_name("digits.npz")


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Images and labels in memory, as they are stored.

    Attributes:
        name: mnist, digits, synthetic or custom; never `auto`.
        x_train: uint8 (n, height, width, channels).
        y_train: int32 (n,), 0 to num_classes - 1.
        x_test: like x_train.
        y_test: like y_train.
        num_classes: number of different labels.
    """

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    num_classes: int

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(height, width, channels)."""
        _, height, width, channels = self.x_train.shape
        return height, width, channels


@dataclasses.dataclass(frozen=True)
class Choice:
    """The data set to load.

    Attributes:
        warning: for the user, if this is a fallback.
        dataset: the `Dataset`, if `prepare` has read it to check it.
    """

    name: str
    warning: str = ""
    dataset: Dataset | None = dataclasses.field(default=None, compare=False)


def prepare(
    name: str,
    *,
    data_dir: Directory | None = None,
    cache_dir: Directory | None = None,
    urls: Sequence[str] | None = None,
    timeout_seconds: float = 12.0,
) -> Choice:
    """Make a data set available on this node, and return which one it is.

    Call it on one rank of each node. It may download; `load` never does.

    Args:
        name: one of `NAMES`. `auto` is mnist if it is available, else digits.
        data_dir: directory of the files of mnist or custom. With it there is neither
            a download nor a fallback.
        cache_dir: see `cached_mnist`, as for the following arguments.

    Raises:
        DataError: an unknown name, one that contradicts `data_dir`, or `mnist` where
            MNIST is not available.
    """
    _check_name(name, data_dir=data_dir)
    if name not in ("auto", "mnist"):
        return Choice(name)
    if data_dir:
        return Choice("mnist")
    try:
        arrays = cached_mnist(cache_dir, urls=urls, timeout_seconds=timeout_seconds)
    except DataError as error:
        if name == "mnist":
            raise
        return Choice("digits", f"Training on digits, NOT on MNIST. {error}")
    return Choice("mnist", dataset=_make_dataset("mnist", label="the cache", **arrays))


def agree(choices: Iterable[Choice]) -> Choice:
    """Return the one choice for all nodes: digits if one node has no MNIST."""
    choices = list(choices)
    return next((choice for choice in choices if choice.warning), choices[0])


def load(
    name: str,
    *,
    data_dir: Directory | None = None,
    cache_dir: Directory | None = None,
) -> Dataset:
    """Load and check a data set that `prepare` made available on this node.

    `name` is the name of a `Choice`; the directories are as `prepare` received them.

    Raises:
        DataError: the data are missing, unreadable or invalid.
    """
    _check_name(name, data_dir=data_dir)
    if name == "digits":
        return _digits()
    if name == "synthetic":
        return _synthetic()
    if name not in ("mnist", "custom"):
        raise DataError(f"Received {name} to load; call prepare first, it decides.")
    directory = data_dir or cache_dir or default_cache_dir()
    pattern = "mnist.npz" if name == "mnist" else "*.npz"
    arrays = formats.read_directory(directory, npz_pattern=pattern)
    dataset = _make_dataset(name, label=directory, **arrays)
    if name == "mnist":
        formats.check_mnist(arrays, label=directory)
    return dataset


def _check_name(name: str, *, data_dir: Directory | None) -> None:
    if name not in NAMES:
        raise DataError(f"Received the data set {name}; expected {', '.join(NAMES)}.")
    if name == "custom" and not data_dir:
        raise DataError("The data set custom needs its directory: data_dir.")
    if name in ("digits", "synthetic") and data_dir:
        raise DataError(
            f"Received the data set {name} and the data directory {data_dir}; expected "
            "one of them: files are for mnist and custom."
        )


def _make_dataset(name: str, *, label: Directory, **arrays: np.ndarray) -> Dataset:
    """Return a `Dataset` of four arrays, after all checks."""
    images = {}
    for split in ("train", "test"):
        x, y = arrays[f"x_{split}"], arrays[f"y_{split}"]
        _check_images(x, label=f"x_{split} in {label}")
        _check_labels(y, count=len(x), label=f"y_{split} in {label}")
        images[split] = np.ascontiguousarray(x if x.ndim == 4 else x[..., None])
    if images["train"].shape[1:] != images["test"].shape[1:]:
        raise DataError(
            f"Received images of shape {images['train'].shape[1:]} to train and "
            f"{images['test'].shape[1:]} to test in {label}; expected one shape."
        )
    y_train, y_test = arrays["y_train"], arrays["y_test"]
    return Dataset(
        name=name,
        x_train=images["train"],
        y_train=y_train.astype(np.int32),
        x_test=images["test"],
        y_test=y_test.astype(np.int32),
        num_classes=_count_classes(y_train, y_test, label=label),
    )


def _check_images(x: np.ndarray, *, label: str) -> None:
    if x.dtype != np.uint8:
        raise DataError(f"Received {label} as {x.dtype}; expected uint8, 0 to 255.")
    if x.ndim not in (3, 4):
        raise DataError(
            f"Received {label} of shape {x.shape}; expected (images, height, width) or "
            "(images, height, width, channels)."
        )
    if not x.size:
        raise DataError(f"Received {label} of shape {x.shape}; expected some images.")


def _check_labels(y: np.ndarray, *, count: int, label: str) -> None:
    if not np.issubdtype(y.dtype, np.integer):
        raise DataError(f"Received {label} as {y.dtype}; expected integers, 0 and up.")
    if y.ndim != 1:
        raise DataError(f"Received {label} of shape {y.shape}; expected ({count},).")
    if len(y) != count:
        raise DataError(
            f"Received {len(y)} labels but {count} images ({label}); expected one "
            "label for each image."
        )


def _count_classes(train: np.ndarray, test: np.ndarray, *, label: Directory) -> int:
    """Return K if the training labels are 0 to K - 1, each one in use."""
    classes = np.unique(train)
    if not np.array_equal(classes, np.arange(len(classes))):
        raise DataError(
            f"Received training labels from {classes[0]} to {classes[-1]} with "
            f"{len(classes)} different values in {label}; expected 0 to K - 1, each in "
            "use: renumber them."
        )
    if test.min() < 0 or test.max() >= len(classes):
        raise DataError(
            f"Received test labels from {test.min()} to {test.max()} in {label}; "
            f"expected 0 to {len(classes) - 1}, as in the training set."
        )
    return len(classes)


def _digits() -> Dataset:
    """Return 1,797 handwritten digits, scaled from 8x8 to 28x28.

    They are the test set of UCI's "Optical Recognition of Handwritten Digits"
    (E. Alpaydin, C. Kaynak 1998; CC BY 4.0; doi:10.24432/C50P49), stored here as uint8
    arrays. Linear interpolation; pixels 0 to 16 become 0 to 255. Every sixth image of
    each class is for testing: 1,497 to train, 300 to test.
    """
    with np.load(_DIGITS) as arrays:
        small, y = arrays["x"], arrays["y"]
    corners = np.linspace(0, 7, 28)
    weights = np.maximum(0, 1 - np.abs(corners[:, None] - np.arange(8)))  # (28, 8)
    x = np.rint(weights @ small @ weights.T * (255 / 16)).astype(np.uint8)
    test = np.zeros(len(y), bool)
    test[np.argsort(y, kind="stable")[::6]] = True
    return _make_dataset(
        "digits",
        label=str(_DIGITS),
        x_train=x[~test],
        y_train=y[~test],
        x_test=x[test],
        y_test=y[test],
    )


def _synthetic() -> Dataset:
    """Return noisy 28x28 images around one random pattern per class: learnable."""
    random = np.random.RandomState(0)
    patterns = random.randint(0, 128, (10, 28, 28))

    def draw(count: int) -> tuple[np.ndarray, np.ndarray]:
        y = np.arange(count) % 10
        return (patterns[y] + random.randint(0, 128, (count, 28, 28))).astype("u1"), y

    (x_train, y_train), (x_test, y_test) = draw(8192), draw(1024)
    return _make_dataset(
        "synthetic",
        label="the generator",
        x_train=x_train,
        y_train=y_train,
        x_test=x_test,
        y_test=y_test,
    )
