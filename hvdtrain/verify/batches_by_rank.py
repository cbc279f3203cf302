"""Batches of a script: recorded on each rank, then replaced by those of all ranks."""

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from hvdtrain.verify.shuffles import shuffles_before_shard
from hvdtrain.verify.trajectory import Directory

# Tensors or arrays in any nest.
Batch: TypeAlias = Any

_JOINED_TYPES = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)
_UNSEEN = (
    "Received {steps} steps of an optimizer with batches that cannot be seen; expected "
    "batches of model.fit, of model.train_on_batch, or of a loop in Python over a "
    "tf.data.Dataset. Iterate over tf.data.Dataset.from_tensor_slices(arrays).batch(n) "
    "in place of slices of arrays, and outside of a tf.function."
)
_UNJOINABLE = (
    " Elements of {spec} cannot be concatenated: yield dense, ragged or sparse "
    "tensors, and leave out None."
)


class BatchRecorder:
    """Writes the batches that a rank reads.

    A stream is one iteration of a dataset. Streams are numbered in the order in which
    they begin, which is the same in all phases.
    """

    def __init__(self, files: Directory, *, rank: int) -> None:
        self._files = files
        self._rank = rank
        self._streams = itertools.count()
        self._calls = itertools.count()
        self._by_iterator: weakref.WeakKeyDictionary[Iterator, int] = (
            weakref.WeakKeyDictionary()
        )
        # How many batches were read of each stream since the last step, and which of
        # these streams have ended.
        self._read: dict[int, int] = {}
        self._ended: set[int] = set()
        self._called = 0
        self._is_evaluating = False
        self._has_steps = False
        self._has_kept_batches = False
        # Of the last dataset that was not recorded.
        self._unjoinable: Any = None
        self.has_loops_in_graphs = False

    @property
    def is_in_step(self) -> bool:
        """Whether a batch was read after the last step."""
        return bool(self._read or self._called)

    def note_steps(self, steps: int) -> None:
        """Note which streams the training reads.

        Args:
            steps: the number of steps since the last call.

        Raises:
            ValueError: their batches were not recorded.
        """
        self._check_seen(steps)
        # A stream that ended before a step was that of an evaluation, unless it is the
        # only one: then the script has kept its batches.
        training = [stream for stream in self._read if stream not in self._ended]
        self._has_kept_batches |= bool(self._read) and not training
        training = training or list(self._read)
        # Before the first step, another stream may have built the model.
        for stream in training if self._has_steps else training[-1:]:
            self._files.write("training", self._rank, stream, value=True)
        self._has_steps = True
        self._read, self._called = {}, 0

    def _check_seen(self, steps: int) -> None:
        seen = self._called + sum(self._read.values())
        is_hidden = self.has_loops_in_graphs and steps > seen
        if is_hidden or not (seen or self._has_kept_batches):
            text = _UNSEEN.format(steps=steps)
            if self._unjoinable is not None:
                text += _UNJOINABLE.format(spec=self._unjoinable)
            raise ValueError(text)

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Leave out what is read in the block: it is not training."""
        self._is_evaluating = True
        try:
            yield
        finally:
            self._is_evaluating = False

    def note_end(self, iterator: Iterator[Batch]) -> None:
        """Note that `iterator` has no more batches."""
        self._ended |= {self._by_iterator.get(iterator, -1)}

    def iterate(
        self, dataset: tf.data.Dataset, iterate: Callable[..., Iterator[Batch]]
    ) -> Iterator[Batch]:
        """Return `iterate(dataset)`, with batches that are recorded."""
        stream, spec = next(self._streams), dataset.element_spec
        numbers = itertools.count()
        if not self._is_evaluating:
            seeds = shuffles_before_shard(dataset)
            self._files.write("shuffles", self._rank, stream, value=seeds)
        if not _can_be_joined(spec):
            self._unjoinable = spec
            return iterate(dataset)

        def write(*arrays: np.ndarray) -> None:
            if self._is_evaluating:
                return
            self._read[stream] = self._read.get(stream, 0) + 1
            numbered = (self._rank, stream, next(numbers))
            self._files.write("batch", *numbered, value=list(arrays))

        def copy(*element: Batch) -> Batch:
            # `map` passes the components of a tuple as arguments.
            batch = element if type(spec) is tuple else element[0]
            parts = tf.nest.flatten(batch, expand_composites=True)
            # A map with a stateful operation is not parallel: numbers are in order.
            with tf.control_dependencies([tf.numpy_function(write, parts, [])]):
                parts = [tf.identity(part) for part in parts]
            return tf.nest.pack_sequence_as(batch, parts, expand_composites=True)

        # TensorFlow would read batches before the training asks for them.
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False
        iterator = iterate(dataset.map(copy).with_options(options))
        self._by_iterator[iterator] = stream
        return iterator

    def exchange_arguments(self, batch: Batch) -> Batch:
        """Return the arguments of `train_on_batch`, as they are."""
        arrays = [None if x is None else np.asarray(x) for x in tf.nest.flatten(batch)]
        self._called += 1
        self._files.write("call", self._rank, next(self._calls), value=arrays)
        return batch


class BatchReplacer:
    """Gives a training the batches of all ranks, concatenated in the order of ranks.

    Args:
        files: the files of the phase in which they were recorded.
        rank: the rank of this process.
        size: the number of ranks.
        is_whole: whether all batches are replaced; else only the first one, and the
            training goes on with its own.
    """

    def __init__(
        self, files: Directory, *, rank: int, size: int, is_whole: bool = True
    ) -> None:
        self._files = files
        self._rank = rank
        self._ranks = range(size)
        self._is_whole = is_whole
        self._streams = itertools.count()
        self._calls = itertools.count()

    def iterate(
        self, dataset: tf.data.Dataset, iterate: Callable[..., Iterator[Batch]]
    ) -> Iterator[Batch]:
        """Return an iterator over what all ranks had in place of `dataset`."""
        spec = dataset.element_spec
        streams = self._streams_by_rank(next(self._streams))
        if not streams:
            return iterate(dataset)

        def batches() -> Iterator[Batch]:
            for number in itertools.count() if self._is_whole else range(1):
                batch = self._joined(spec, streams, number)
                if batch is None:
                    return
                yield batch

        first = self._joined(spec, streams, 0)
        signature = tf.nest.map_structure(self._with_more_rows, spec, first)
        joined = tf.data.Dataset.from_generator(batches, output_signature=signature)
        if not self._is_whole:
            joined = joined.concatenate(dataset.skip(1))
        return iterate(joined)

    def exchange_arguments(self, batch: Batch) -> Batch:
        """Return the arguments of `train_on_batch` of all ranks."""
        number = next(self._calls)
        if number and not self._is_whole:
            return batch
        arrays_by_rank = [
            arrays
            for rank in self._ranks
            if (arrays := self._files.read("call", rank, number))
        ]
        if not arrays_by_rank:
            return batch
        joined = list(map(_join, zip(*arrays_by_rank, strict=True)))
        return tf.nest.pack_sequence_as(batch, joined)

    def _streams_by_rank(self, stream: int) -> list[tuple[int, int]]:
        """Return the rank and the stream that each rank had in place of `stream`.

        The list is empty if the training does not read the stream.
        """
        # Another rank may have iterated more datasets, to validate on it alone.
        streams_by_rank = [
            self._files.last_numbers("training", rank) for rank in self._ranks
        ]
        own = streams_by_rank[self._rank]
        if stream not in own:
            return []
        place = own.index(stream)
        if place and not self._is_whole:
            return []
        return [
            (rank, streams[place])
            for rank, streams in enumerate(streams_by_rank)
            if place < len(streams)
        ]

    def _joined(
        self, spec: Any, streams: Sequence[tuple[int, int]], number: int
    ) -> Batch:
        """Return one batch of all ranks, or None after the last one."""
        # A rank with fewer batches than the others has none for the last numbers.
        parts_by_rank = [
            parts
            for rank, stream in streams
            if (parts := self._files.read("batch", rank, stream, number))
        ]
        if not parts_by_rank:
            return None
        flat_by_rank = [
            tf.nest.flatten(
                tf.nest.pack_sequence_as(spec, parts, expand_composites=True)
            )
            for parts in parts_by_rank
        ]
        joined = list(map(_join, zip(*flat_by_rank, strict=True)))
        return tf.nest.pack_sequence_as(spec, joined)

    def _with_more_rows(self, spec: tf.TypeSpec, joined: Any) -> tf.TypeSpec:
        """Return the type of a batch of one rank for the batches of all ranks."""
        if not spec.shape.rank:
            return spec
        is_fixed = self._is_whole and spec.shape[0] is not None
        shape = [joined.shape[0] if is_fixed else None, *spec.shape[1:]]
        if isinstance(spec, tf.RaggedTensorSpec):
            return tf.RaggedTensorSpec(
                shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype
            )
        return type(spec)(shape, spec.dtype)


def _can_be_joined(spec: Any) -> bool:
    return all(isinstance(part, _JOINED_TYPES) for part in tf.nest.flatten(spec))


def _join(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, tf.SparseTensor):
        return tf.sparse.concat(0, list(values))
    # Scalars, such as a rate, are the same on all ranks.
    if first is None or not len(first.shape):
        return first
    _check_shapes([value.shape for value in values])
    if isinstance(first, np.ndarray):
        return np.concatenate(values)
    return tf.concat(list(values), axis=0)


def _check_shapes(shapes: Sequence[Sequence[int]]) -> None:
    if len({tuple(shape[1:]) for shape in shapes}) > 1:
        raise ValueError(
            f"The batches of the ranks have the shapes {' and '.join(map(str, shapes))}"
            "; expected shapes that differ in the first number only: pad all batches "
            "to one length, as with padded_shapes of tf.data.Dataset.padded_batch."
        )
