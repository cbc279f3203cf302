"""What a source of samples is, and the sources in memory: arrays and sequences."""

import collections
import collections.abc
import dataclasses
import importlib
import math
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from hvdtrain.data.formats import DataError
from hvdtrain.data.sample_functions import take_rows
from hvdtrain.data.sampler import Sampler

# A function of TensorFlow tensors, traced by tf.data.
TensorFunction = Callable[[Any], Any]


# Objects with len and [i] whose items are no samples, by library and class, and what to
# use in their place. By name: no library has to be loaded.
_REMEDIES = {
    ("datasets", "DatasetDict"): "one of its splits, such as dataset['train']",
    ("grain", "BatchMapDataset"): "it without .batch(): fit makes batches",
    ("keras", "PyDataset"): (
        "samples, since fit makes batches: its arrays, or a class whose [i] is one "
        "sample"
    ),
    ("pandas", "DataFrame"): "{name: frame[name].to_numpy() for name in frame}",
    ("pandas", "Series"): "series.to_numpy()",
}
_ITERABLE = (
    "samples that are read by their numbers, with len and [i]. Of Hugging Face: "
    "load_dataset without streaming=True, or data.Parquet(files). Of Grain: a "
    "MapDataset, without to_iter_dataset(). Of TensorFlow Datasets: tfds.data_source, "
    "or data.TFRecord(files, parse). Others: a list, or a class of yours. "
    "training.train_and_evaluate takes a tf.data.Dataset, by its input_fn"
)

# By the object that is read, which several sources may have.
_locks: dict[int, threading.Lock] = collections.defaultdict(threading.Lock)


class Source:
    """Samples by number: a length, and a function that reads some of them.

    A subclass has `__len__` and `read`. It may set the attributes. Where samples cannot
    be read in any order at one speed, it overrides `shuffle`, and sets `has_order`.

    Attributes:
        parse: function of the nest that `read` returns, as tensors, that returns a nest
            of dense tensors with as many samples; None for no parsing.
        decode: function of one sample, as tensors, for formats that TensorFlow decodes
            one by one, such as images; None for no decoding.
        locks: held while samples are read, unless `workers` are asked for; none where
            several threads may call `read` at a time.
        is_grouped: whether neighbouring samples are read together. Each rank then reads
            neighbours of a global batch: a contiguous share of it, sorted by `sort`.
        has_order: whether the source overrides `shuffle`.
        is_remote: whether samples are read from a store, whose latency several reads at
            a time hide.
    """

    parse: TensorFunction | None = None
    decode: TensorFunction | None = None
    locks: Sequence[threading.Lock] = ()
    is_grouped = False
    has_order = False
    is_remote = False

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, indices: np.ndarray) -> Any:
        """Return the samples at `indices` (int64, of shape (n,)), in this order.

        Returns:
            A nest of dictionaries and tuples of arrays of shape (n, ...).
        """
        raise NotImplementedError

    def shuffle(self, sampler: Sampler, positions: np.ndarray) -> np.ndarray:
        """Return the numbers of the samples at positions in the endless sequence.

        A pure function of `sampler.seed` and the positions: another rank, or a job that
        continues, computes the same.
        """
        return sampler.shuffle(positions)

    def sort(self, indices: np.ndarray) -> np.ndarray:
        """Return the places of the samples of a batch, neighbours side by side."""
        return np.argsort(indices, kind="stable")

    def fingerprint(self) -> Any:
        """Return what must be the same when a job continues, as values for JSON."""
        return {"samples": len(self)}

    def version(self) -> Any:
        """Return what identifies the content on this machine, as values for JSON.

        An index of the source is kept in the cache under it. None if nothing
        identifies the content.
        """
        return None


class ArraySource(Source):
    """The rows of an array or of a memory map, such as `np.load(path, mmap_mode="r")`.

    The array is referred to, not copied.
    """

    def __init__(self, array: np.ndarray) -> None:
        if not array.ndim or not len(array):
            raise DataError(
                f"Received an array of shape {array.shape}; expected (samples, ...)."
            )
        if np.ma.isMaskedArray(array):
            raise DataError(
                "Received a masked array, whose mask would be lost; expected a plain "
                "one: fill it."
            )
        if array.dtype.kind in "MmTV" and array.dtype.name != "bfloat16":
            raise DataError(
                f"Received an array of {array.dtype}; expected numbers, booleans, text "
                "or bytes: convert it."
            )
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    def read(self, indices: np.ndarray) -> np.ndarray:
        # A class derived from NumPy's may have an indexing of its own.
        is_plain = type(self._array) in (np.ndarray, np.memmap)
        if not is_plain or self._array.dtype.kind in "OSU":
            values = np.asarray(self._array[indices])
            # TensorFlow takes text of NumPy's own type in ASCII only.
            return values.astype(object) if values.dtype.kind == "U" else values
        return take_rows(self._array, indices)

    def fingerprint(self) -> Any:
        array = self._array
        return {"shape": list(array.shape), "dtype": array.dtype.name}


class Readable(Protocol):
    """A sequence: `len(sequence)` and `sequence[index]`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class SequenceSource(Source):
    """Any object with `len` and `[i]`, such as a data set of Hugging Face or of Grain.

    A sample is an array, a number, bytes, text, or a dictionary or tuple of these.
    Where the object has `__getitems__`, a batch is read by one call of it.
    """

    def __init__(self, sequence: Readable) -> None:
        self._sequence = sequence
        # The object may keep a file position, and be read by an evaluation meanwhile.
        self.locks = [_locks[id(sequence)]]
        self._name = type(sequence).__name__
        if not len(sequence):
            raise DataError(f"Received {self._name} without samples; expected some.")
        if len(sequence) == sys.maxsize:
            raise DataError(
                f"Received {self._name} without an end; expected each sample once: "
                "leave out repeat(), since epochs and max_steps repeat samples."
            )

    def __len__(self) -> int:
        return len(self._sequence)

    def read(self, indices: np.ndarray) -> Any:
        return stack(self.get_many(indices.tolist()), indices)

    def get_many(self, indices: list[int]) -> Sequence[Any]:
        """Return the samples at `indices`.

        Raises:
            DataError: the object has raised an error, which is the cause of this one.
        """
        read_many = getattr(self._sequence, "__getitems__", None)
        text = "the samples from {} on" if read_many else "sample {}"
        index, samples = indices[0], []
        try:
            if read_many:
                return read_many(indices)
            for index in indices:
                samples.append(self._sequence[index])
        except Exception as error:
            # The first frame is this one; code in C has no other.
            frames = traceback.extract_tb(error.__traceback__)[1:2]
            place = "".join(f" ({x.filename}, line {x.lineno})" for x in frames)
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise DataError(
                f"Cannot read {text.format(index)} of {self._name}: {reason}{place}; "
                "expected a sample for each number: repeat in [i] what may fail, or "
                "leave such samples out of len."
            ) from error
        return samples


class ZippedSource(Source):
    """A dictionary or tuple of sources of one length: a sample has one of each."""

    def __init__(self, nest: Mapping[str, Any] | tuple[Any, ...]) -> None:
        self._is_mapping = isinstance(nest, collections.abc.Mapping)
        pairs = nest.items() if isinstance(nest, Mapping) else enumerate(nest)
        self._sources = {key: as_source(value) for key, value in pairs}
        lengths = {key: len(source) for key, source in self._sources.items()}
        if len(set(lengths.values())) != 1:
            text = ", ".join(f"{key}: {length}" for key, length in lengths.items())
            raise DataError(
                f"Received numbers of samples {{{text}}}; expected one number for all."
            )
        children = self._sources.values()
        for source in children:
            if source.has_order:
                raise DataError(
                    f"Received {type(source).__name__} with other sources; expected "
                    "it alone, since its samples have an order of their own."
                )
        self.locks = all_locks(children)
        self.is_remote = any(source.is_remote for source in children)
        if any(source.parse for source in children):
            self.parse = self._by_column(source.parse for source in children)
        if any(source.decode for source in children):
            self.decode = self._by_column(source.decode for source in children)

    def __len__(self) -> int:
        return len(next(iter(self._sources.values())))

    def read(self, indices: np.ndarray) -> Any:
        return self._pack(source.read(indices) for source in self._sources.values())

    def fingerprint(self) -> Any:
        prints = {str(key): s.fingerprint() for key, s in self._sources.items()}
        return prints if self._is_mapping else list(prints.values())

    def _by_column(self, functions: Iterable[TensorFunction | None]) -> "_ByColumn":
        return _ByColumn(tuple(self._sources), tuple(functions), self._is_mapping)

    def _pack(self, values: Iterator[Any]) -> Any:
        if self._is_mapping:
            return dict(zip(self._sources, values, strict=True))
        return tuple(values)


@dataclasses.dataclass(frozen=True)
class _ByColumn:
    """A function for each column. Equal to another one of the same functions."""

    keys: tuple[Any, ...]
    functions: tuple[TensorFunction | None, ...]
    is_mapping: bool

    def __call__(self, values: Any) -> Any:
        # By key: tf.data sorts the keys of dictionaries.
        columns = {
            key: function(values[key]) if function else values[key]
            for key, function in zip(self.keys, self.functions, strict=True)
        }
        return columns if self.is_mapping else tuple(columns.values())


@dataclasses.dataclass(frozen=True)
class _Composition:
    """`second(first(sample))`. Equal to another one of the same functions."""

    first: TensorFunction | None
    second: TensorFunction

    def __call__(self, sample: Any) -> Any:
        return self.second(self.first(sample) if self.first else sample)


class MappedSource(Source):
    """The samples of a source after a function; see `map_samples`."""

    def __init__(self, source: Source, function: TensorFunction) -> None:
        self._source = source
        self.parse = source.parse
        self.decode = _Composition(source.decode, function)
        self.locks = source.locks
        self.is_grouped = source.is_grouped
        self.has_order = source.has_order
        self.is_remote = source.is_remote

    def __len__(self) -> int:
        return len(self._source)

    def read(self, indices: np.ndarray) -> Any:
        return self._source.read(indices)

    def shuffle(self, sampler: Sampler, positions: np.ndarray) -> np.ndarray:
        return self._source.shuffle(sampler, positions)

    def sort(self, indices: np.ndarray) -> np.ndarray:
        return self._source.sort(indices)

    def fingerprint(self) -> Any:
        return self._source.fingerprint()


def map_samples(source: Any, function: TensorFunction) -> Source:
    """Return a source whose samples are `function(sample)`.

    Args:
        source: as for `batches`.
        function: a function of the tensors of one sample, traced by tf.data, such as
            one that returns the pair of input and target that `training.fit` needs.
            Random numbers belong into the `transform` of `batches`, which has a seed.
    """
    return MappedSource(as_source(source), function)


def as_source(data: Any) -> Source:
    """Return a `Source` of arrays, of a nest of them, of a sequence, or itself.

    Raises:
        DataError: it is none of these.
    """
    if isinstance(data, Source):
        return data
    _check_class(data)
    if isinstance(data, np.ndarray):
        return ArraySource(data)
    if isinstance(data, dict | tuple) and data:
        return ZippedSource(data)
    is_sequence = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if is_sequence and not isinstance(data, str | bytes):
        return SequenceSource(data)
    expected = (
        "an object with len and [i]: an array, a dictionary or tuple of arrays, a "
        "sequence, or a source such as data.TFRecord"
    )
    if hasattr(data, "__iter__") and not isinstance(data, str | bytes):
        expected = _ITERABLE
    raise DataError(f"Received {type(data).__name__} as samples; expected {expected}.")


def _check_class(data: Any) -> None:
    """Check that the items of an object with `len` and `[i]` may be samples."""
    for cls in type(data).__mro__:
        library = cls.__module__.partition(".")[0]
        if remedy := _REMEDIES.get((library, cls.__name__)):
            raise DataError(
                f"Received {cls.__name__} of {library} as samples; expected {remedy}."
            )


def all_locks(sources: Iterable[Source]) -> list[threading.Lock]:
    """Return the locks of several sources, each once."""
    return list(dict.fromkeys(lock for source in sources for lock in source.locks))


def stack(samples: Sequence[Any], indices: np.ndarray) -> Any:
    """Return the nest of arrays of shape (n, ...) of `n` samples of one structure.

    Args:
        indices: the numbers of the samples, for errors.
    """
    first = samples[0]
    is_nest = isinstance(first, collections.abc.Mapping | tuple)
    for index, sample in zip(indices, samples, strict=True):
        if is_nest and _structure(sample) != _structure(first):
            raise DataError(
                f"Received sample {index}, {sample!r:.80}, of other structure than "
                f"sample {indices[0]}, {first!r:.80}; expected one structure."
            )
    if isinstance(first, collections.abc.Mapping):
        return {key: stack([s[key] for s in samples], indices) for key in first}
    if isinstance(first, tuple):
        columns = zip(*samples, strict=True)
        return tuple(stack(column, indices) for column in columns)
    return _stack_arrays(samples, indices)


def _structure(sample: Any) -> Any:
    """Return the keys of a dictionary, the length of a tuple, None for others."""
    if isinstance(sample, collections.abc.Mapping):
        return set(sample)
    return len(sample) if isinstance(sample, tuple) else None


def _stack_arrays(values: Sequence[Any], indices: np.ndarray) -> np.ndarray:
    if isinstance(values[0], bytes | str):
        # NumPy's own type for bytes drops zeros at the end.
        array = np.empty(len(values), object)
        array[:] = values
        return array
    arrays = [as_array(value) for value in values]
    for index, value, array in zip(indices, values, arrays, strict=True):
        if array.dtype.kind not in "biufc" and array.dtype.name != "bfloat16":
            raise DataError(
                f"Received sample {index} with {value!r:.80}; expected numbers, text, "
                "bytes, or arrays, dictionaries or tuples of them."
            )
        # One type for all would depend on which samples are read together.
        if array.dtype != arrays[0].dtype:
            raise DataError(
                f"Received sample {index} of {array.dtype.name} and sample "
                f"{indices[0]} of {arrays[0].dtype.name}; expected arrays of one "
                "dtype: convert them."
            )
        if array.shape != arrays[0].shape:
            raise DataError(
                f"Received sample {index} of shape {array.shape} and sample "
                f"{indices[0]} of shape {arrays[0].shape}; expected arrays of one "
                "shape: data.pad pads them, data.pack packs sequences of tokens."
            )
    return np.stack(arrays)


def as_array(value: Any) -> np.ndarray:
    """Return an array of a value: Python's floats become float32, as in tf.data."""
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise DataError(
            f"Received {value!r:.80} as an array: {error}; expected numbers of one "
            "shape: data.pad pads sequences."
        ) from None
    is_python = not isinstance(value, np.ndarray | np.generic)
    return array.astype(np.float32) if is_python and array.dtype == float else array


def cast(array: np.ndarray, dtype: np.typing.DTypeLike, where: str) -> np.ndarray:
    """Return an array in another dtype, rounded to it.

    Args:
        where: what the error adds to a value, such as " in sample 1".

    Raises:
        DataError: a value is out of the range of `dtype`, or is a fraction or NaN that
            an integer cannot be.
    """
    with np.errstate(all="ignore"):
        result = array.astype(dtype)
    if result.dtype.kind in "iub":
        is_lost = result != array
    else:
        is_lost = np.isinf(result) & np.isfinite(array)
    if is_lost.any():
        raise DataError(
            f"Received {array[is_lost][0]}{where}; expected a number that "
            f"{result.dtype} has: convert it, or take another type."
        )
    return result


def count_bytes(nest: Any) -> int:
    """Return the size of a nest of arrays in memory, an estimate for text."""
    if isinstance(nest, collections.abc.Mapping):
        return sum(map(count_bytes, nest.values()))
    if isinstance(nest, tuple):
        return sum(map(count_bytes, nest))
    if nest.dtype == object:
        return sum(len(value) for value in nest.flat)
    return math.prod(nest.shape) * nest.dtype.itemsize


def load_library(module: str, extra: str) -> Any:
    """Return a module of a library that is installed by an extra of the package.

    Raises:
        DataError: it is not installed, or it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise DataError(
            f"{module.partition('.')[0]} is not installed: pip install "
            f"'hvdtrain[{extra}]'."
        ) from None
    except ImportError as error:
        raise DataError(
            f"Cannot import {module}: {str(error).splitlines()[0]}; expected the "
            f"version of hvdtrain[{extra}]: install it again."
        ) from None
