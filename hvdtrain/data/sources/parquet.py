"""Samples that are the rows of Parquet files."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from hvdtrain.data.formats import DataError, Path
from hvdtrain.data.index_shuffle import index_shuffle
from hvdtrain.data.sampler import Sampler, by_epoch
from hvdtrain.data.sources.arrow_columns import SUPPORTED, ArrowColumns
from hvdtrain.data.sources.data_files import DataFile, Pattern, find_files
from hvdtrain.data.sources.parquet_ranges import RowGroup, read_footer
from hvdtrain.data.sources.remote_files import RemoteFile, map_concurrently
from hvdtrain.data.sources.source import Source, TensorFunction, load_library
from hvdtrain.job.files import one_line_errors

_EXTRA = "parquet"

Group = TypeVar("Group")


class Parquet(Source):
    """The rows of Parquet files, as dictionaries of columns.

    Numbers and booleans keep their types. Text and binary columns are `tf.string`.
    Lists of numbers, of one length in the whole column, are vectors. Keras trains on
    pairs, which `parse` returns::

        data.Parquet(
            "train-*.parquet",
            ["age", "income", "label"],
            parse=lambda rows: ((rows["age"], rows["income"]), rows["label"]),
        )

    A row cannot be read alone, only its row group. The shuffle is therefore coarser
    than for arrays: in each epoch the row groups are permuted, each `window` of
    them in this order form a window, and the rows are permuted inside of each window.
    Rows of one batch are from one window, or from two where it ends in the batch. If
    the rows of the files are sorted, by label for example, shuffle them once when they
    are written, or take a larger window.

    Each rank reads neighbouring rows of a global batch, and hence a part of the row
    groups: of 4 ranks, each decodes about 2/3 of them with a window of 4, and 3/8 with
    a window of 16. A rank keeps up to `2 * window` decoded row groups in memory, and
    about 80 bytes for each row group of all files.

    Of files in a store, the footers are read first, and then the columns of one row
    group at a time.

    Args:
        files: a path, an address, a pattern such as "train-*.parquet" or
            "s3://bucket/train-*.parquet", or a list of these.
        columns: names of the columns that are read; by default all of the first file.
        parse: function of the dictionary of some rows, as tensors of shape (rows, ...),
            that returns a nest of dense tensors with as many rows.
        window: number of row groups that are shuffled together.

    Raises:
        DataError: pyarrow is not installed, a file is not a readable Parquet file, the
            files have different columns, a column does not exist or has an
            unsupported type, or there are no rows.
    """

    is_grouped = True
    has_order = True

    def __init__(
        self,
        files: Pattern | Iterable[Pattern],
        columns: Sequence[str] | None = None,
        *,
        parse: TensorFunction | None = None,
        window: int = 4,
    ) -> None:
        if window < 1:
            raise DataError(f"Received a window of {window}; expected 1 or more.")
        if isinstance(columns, str) or (columns is not None and not columns):
            raise DataError(
                f"Received columns={columns!r}; expected a list of names, or None."
            )
        self.parse = parse
        self._window = window
        self._arrow = ArrowColumns(_EXTRA)
        self._parquet = load_library("pyarrow.parquet", _EXTRA)
        self._files: list[DataFile] = []
        # By column, the name of its type.
        self._types: dict[str, str] = {}
        # By row group with rows: its file, its number there, its rows.
        groups: list[tuple[int, int, int]] = []
        found = find_files(files)
        self.is_remote = any(isinstance(file, RemoteFile) for file in found)
        read = map_concurrently if self.is_remote else map
        for file, metadata in zip(found, read(self._read_footer, found), strict=True):
            groups.extend(self._add_file(file, metadata, columns))
        self._groups = np.array(groups, np.int64).reshape(-1, 3)
        sizes = self._groups[:, 2]
        if not len(sizes):
            raise DataError(
                f"Received {self._files[0].path} without rows in it or in the other "
                f"{len(self._files) - 1} files; expected rows."
            )
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        self._order = WindowedOrder(sizes, window)
        # Two windows: batches at the end of one are read at the same time as batches of
        # the next.
        self._cache = GroupCache(self._load, capacity=2 * window)
        # The footer of a file with many row groups takes longer to parse than a group.
        self._metadata = functools.lru_cache(maxsize=2 * window)(self._read_metadata)
        # By column, the shape of a row.
        self._shapes: dict[str, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return int(self._starts[-1])

    def shuffle(self, sampler: Sampler, positions: np.ndarray) -> np.ndarray:
        return self._order.shuffle(sampler, positions)

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        groups = np.searchsorted(self._starts, indices, side="right") - 1
        # In the order in which they occur: the groups of the last window stay cached.
        numbers, firsts = np.unique(groups, return_index=True)
        parts: dict[str, list[np.ndarray]] = {name: [] for name in self._types}
        places = []
        for number in numbers[np.argsort(firsts)]:
            [place] = np.nonzero(groups == number)
            rows = indices[place] - self._starts[number]
            for name, values in self._cache.get(int(number)).items():
                parts[name].append(self._arrow.take(values, rows))
            places.append(place)
        order = np.argsort(np.concatenate(places))
        return {name: np.concatenate(part)[order] for name, part in parts.items()}

    def fingerprint(self) -> Any:
        digest = hashlib.sha256(self._groups.tobytes())
        for file in self._files:
            digest.update(f"{file.name}\0{file.size}\0".encode())
        return {
            "samples": len(self),
            "files": len(self._files),
            "columns": self._types,
            "window": self._window,
            "digest": digest.hexdigest(),
        }

    def _add_file(
        self, file: DataFile, metadata: Any, columns: Sequence[str] | None
    ) -> list[tuple[int, int, int]]:
        """Check the columns of a file, and return its row groups."""
        path = file.path
        with _reading(path):
            schema = metadata.schema.to_arrow_schema()
        names = list(columns or self._types or schema.names)
        types = {name: self._type(schema, name, path) for name in names}
        if not self._files:
            self._types = types
        first = self._files[0].path if self._files else path
        extra = set(schema.names) - set(types) if columns is None else set()
        if types != self._types or extra:
            raise DataError(
                f"Received {path} with {_differences(types, self._types, extra)} in "
                f"{first}; expected one schema in all files: write the file again, or "
                "name the columns that it shares."
            )
        self._files.append(file)
        rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        number = len(self._files) - 1
        return [(number, i, count) for i, count in enumerate(rows) if count]

    def _type(self, schema: Any, name: str, path: Path) -> str:
        if name not in schema.names:
            raise DataError(
                f"Received the column {name}, which {path} does not have; expected "
                f"some of {', '.join(schema.names)}."
            )
        if schema.names.count(name) > 1:
            raise DataError(
                f"Received several columns {name} in {path}; expected names that "
                "differ: write the file again, or name other columns."
            )
        dtype = schema.field(name).type
        if found := self._arrow.name_of_type(dtype):
            return found
        raise DataError(
            f"Received the column {name} of type {dtype} in {path}; expected "
            f"{SUPPORTED}: convert it, or name other columns."
        )

    def _load(self, number: int) -> dict[str, Any]:
        """Return the decoded columns of a row group."""
        file_number, group, _ = self._groups[number].tolist()
        file = self._files[file_number]
        with _reading(file.path, group):
            file.check()
            metadata = self._metadata(file_number)
            source: Any = file.path
            if isinstance(file, RemoteFile):
                source = RowGroup(file, metadata, group, self._types)
            # What is read before is in memory already.
            with self._parquet.ParquetFile(
                source,
                metadata=metadata,
                pre_buffer=source is file.path,
                # Only pages that were written with a checksum are verified.
                page_checksum_verification=True,
            ) as contents:
                # No threads of its own: several row groups are read at a time.
                table = contents.read_row_group(
                    group, columns=list(self._types), use_threads=False
                )
        where = f"{file.path}, row group {group}"
        return {name: self._column(table, name, where) for name in self._types}

    def _column(self, table: Any, name: str, where: str) -> Any:
        label = f"the column {name} of {where}"
        values = self._arrow.convert(table.column(name), label=label)
        if isinstance(values, np.ndarray):
            shape = self._shapes.setdefault(name, values.shape[1:])
            if values.shape[1:] != shape:
                raise DataError(
                    f"Received values of shape {values.shape[1:]} in {label}, and of "
                    f"shape {shape} in another row group; expected one length for all "
                    "rows: pad them, or leave the column out."
                )
        return values

    def _read_metadata(self, file_number: int) -> Any:
        return self._read_footer(self._files[file_number])

    def _read_footer(self, file: DataFile) -> Any:
        with _reading(file.path):
            source = read_footer(file) if isinstance(file, RemoteFile) else file.path
            return self._parquet.read_metadata(source)


class GroupCache(Generic[Group]):
    """The row groups that several threads have used last.

    A group that they need at the same time is loaded by one of them.

    Args:
        capacity: number of groups that are kept.
    """

    def __init__(self, load: Callable[[int], Group], *, capacity: int) -> None:
        self._load = load
        self._capacity = capacity
        self._lock = threading.Lock()
        self._futures: collections.OrderedDict[
            int, concurrent.futures.Future[Group]
        ] = collections.OrderedDict()

    def get(self, number: int) -> Group:
        """Return a group. Raises what `load` raises, in each thread that needs it."""
        with self._lock:
            is_new = number not in self._futures
            future = self._futures.setdefault(number, concurrent.futures.Future())
            self._futures.move_to_end(number)
            if len(self._futures) > self._capacity:
                self._futures.popitem(last=False)
        if is_new:
            try:
                future.set_result(self._load(number))
            except BaseException as error:
                # The next call tries again.
                with self._lock:
                    if self._futures.get(number) is future:
                        del self._futures[number]
                future.set_exception(error)
        return future.result()


def _reading(
    path: Path, group: int | None = None
) -> contextlib.AbstractContextManager[None]:
    place = "" if group is None else f", row group {group}"
    return one_line_errors(
        f"read {path}{place}",
        # pyarrow's exceptions are among them.
        errors=(OSError, ValueError, NotImplementedError, MemoryError),
        remedy="expected a complete Parquet file that this user may read: fetch or "
        "write it again",
        raises=DataError,
    )


def _differences(
    types: dict[str, str], expected: dict[str, str], extra: set[str]
) -> str:
    if extra:
        return f"the column {', '.join(sorted(extra))}, which is not"
    name = next(name for name in expected if types[name] != expected[name])
    return f"the column {name} of type {types[name]}, which is {expected[name]}"


@dataclasses.dataclass(frozen=True)
class _Epoch:
    """The groups in the order of an epoch, and where they start in it.

    Attributes:
        starts: position of the first sample of each group, and the number of samples.
        firsts: number of the first sample of each group.
        windows: position of the first sample of each window, and the number of samples.
    """

    starts: np.ndarray
    firsts: np.ndarray
    windows: np.ndarray


class WindowedOrder:
    """The order of the samples of groups; a pure function of (seed, epoch, position).

    For samples that are stored in groups, of which each is read as a whole. The groups
    are permuted. Each `window` consecutive groups of this order form a window, and the
    samples of a window are permuted. Hence the samples of a batch are in `window`
    groups, or in twice as many where the batch contains the end of a window, and a
    reader that keeps so many groups reads each of them once an epoch.

    Args:
        sizes: number of samples of each group, 1 or more. Sample numbers count through
            the groups.
        window: number of groups whose samples are permuted together.
    """

    def __init__(self, sizes: np.ndarray, window: int) -> None:
        self._sizes = sizes.astype(np.int64)
        self._window = window
        # Two: a global batch may contain the end of one epoch and the start of the
        # next. The cache belongs to this object, and ends with it.
        self._epoch = functools.lru_cache(maxsize=2)(self._make_epoch)

    def shuffle(self, sampler: Sampler, positions: np.ndarray) -> np.ndarray:
        """Return the numbers of the samples at positions in the endless sequence."""
        permute = functools.partial(self._permute, seed=sampler.seed)
        return by_epoch(positions, sampler.num_samples, permute)

    def _permute(self, offsets: np.ndarray, epoch: int, *, seed: int) -> np.ndarray:
        order = self._epoch(seed, epoch)
        windows = np.searchsorted(order.windows, offsets, side="right") - 1
        shuffled = np.empty_like(offsets)
        for window in np.unique(windows):
            in_window = windows == window
            start, end = order.windows[window : window + 2]
            # A seed is less than 2**32: no two windows have one permutation.
            shuffled[in_window] = start + index_shuffle(
                offsets[in_window] - start,
                num_samples=int(end - start),
                seed=seed + (int(window + 1) << 32),
                epoch=epoch,
            )
        groups = np.searchsorted(order.starts, shuffled, side="right") - 1
        return order.firsts[groups] + shuffled - order.starts[groups]

    def _make_epoch(self, seed: int, epoch: int) -> _Epoch:
        count = len(self._sizes)
        groups = index_shuffle(
            np.arange(count), num_samples=count, seed=seed, epoch=epoch
        )
        starts = np.concatenate([[0], np.cumsum(self._sizes[groups])])
        firsts = np.cumsum(self._sizes) - self._sizes
        windows = np.append(starts[: -1 : self._window], starts[-1])
        return _Epoch(starts, firsts[groups], windows)
