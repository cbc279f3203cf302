"""The batches of one rank from any source, as `tf.data` datasets."""

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain import native
from hvdtrain.data.formats import DataError
from hvdtrain.data.sample_functions import use_library
from hvdtrain.data.sampler import Sampler, check_rank
from hvdtrain.data.sources.parsing import parse
from hvdtrain.data.sources.source import Source, as_source, count_bytes

# Steps per call into Python, which takes 0.4 ms of a core with the iterator of a block.
# Steps of 0.55 ms are 9 % faster with 64 of them in a block than with 20.
_MAX_BLOCK_STEPS = 64
_MAX_BLOCK_BYTES = 16 << 20
# Blocks that are read at the same time from a store.
_REMOTE_CALLS = 8

# transform(sample, seed): a function of the tensors of one sample.
Transform = Callable[[Any, tf.Tensor], Any]


def batches(
    source: Any,
    sampler: Sampler,
    start_step: int,
    end_step: int,
    *,
    transform: Transform | None = None,
    workers: int | None = None,
) -> tf.data.Dataset:
    """Return the batches of one rank from `start_step` to before `end_step`.

    A batch is a function of the sampler and of its step: neither the step at which a
    job continues nor the time that a read takes changes it. The samples of a global
    batch are the same for every number of ranks.

    Args:
        source: arrays, a dictionary or tuple of arrays, an object with `len` and `[i]`,
            or a source such as `data.TFRecord`.
        sampler: of as many samples as the source has.
        transform: `transform(sample, seed)` returns the sample that is trained on. It
            is a function of tensors, traced by tf.data. `seed` is an int64 tensor of
            shape (2,), a function of the sampler's seed and of the position of the
            sample, for `tf.random.stateless_uniform` and
            `tf.image.stateless_random_crop`, for example.
        workers: number of blocks that are read, and of samples that are transformed, at
            the same time. By default as many as this rank has threads; a sequence is
            then read by one thread.

    Raises:
        DataError: the sampler is for another number of samples, or a step is out of
            range. A file that cannot be read fails the step that needs it.
    """
    source = as_source(source)
    if sampler.num_samples != len(source):
        raise DataError(
            f"Received a sampler of {sampler.num_samples} samples for a source of "
            f"{len(source)}; expected one number."
        )
    sampler.check_steps(start_step, end_step)
    deal = _deal_sorted if source.is_grouped else _deal
    dataset = _Reader(source, functools.partial(deal, sampler, source), workers).read(
        range(start_step, end_step),
        local_batch_size=sampler.local_batch_size,
        transform=transform and functools.partial(_seeded, transform, sampler.seed),
    )
    return dataset.apply(tf.data.experimental.assert_cardinality(end_step - start_step))


def one_pass(
    source: Any,
    *,
    rank: int,
    size: int,
    local_batch_size: int,
    workers: int | None = None,
) -> tf.data.Dataset:
    """Return this rank's batches of one pass over a source, to evaluate a model.

    Over all ranks each sample occurs exactly once, without an order of the batches
    across ranks. The last batch may be smaller, and a rank may have one batch less than
    another: sum the states of metrics over the ranks afterwards.

    Args:
        source: as for `batches`.
        rank: 0 to `size - 1`.

    Raises:
        DataError: there are more ranks than samples, or a number is out of range.
    """
    source = as_source(source)
    check_rank(rank, size=size, num_samples=len(source))
    if local_batch_size < 1:
        raise DataError(f"Received a batch of {local_batch_size}; expected 1 or more.")
    # Contiguous shares: a file is read by few ranks.
    start, end = (len(source) * number // size for number in (rank, rank + 1))

    def deal(first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        bounds = (min(start + step * local_batch_size, end) for step in (first, last))
        numbers = np.arange(*bounds)
        return numbers, numbers

    return _Reader(source, deal, workers).read(
        range(-(-(end - start) // local_batch_size)),
        local_batch_size=local_batch_size,
        is_exact=False,
    )


def _deal(
    sampler: Sampler, source: Source, first: int, last: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return sample numbers and positions of this rank for some steps, in order."""
    positions = sampler.positions(first, last).ravel()
    return source.shuffle(sampler, positions), positions


def _deal_sorted(
    sampler: Sampler, source: Source, first: int, last: int
) -> tuple[np.ndarray, np.ndarray]:
    """Deal each global batch as `source.sort` orders it, in contiguous shares."""
    job = dataclasses.replace(sampler, rank=0, size=1)
    positions = job.positions(first, last)
    numbers = source.shuffle(job, positions)
    order = np.stack([source.sort(of_step) for of_step in numbers])
    # The first ranks have the rest, as by stride.
    size, rest = divmod(sampler.global_batch_size, sampler.size)
    start = sampler.rank * size + min(sampler.rank, rest)
    share = order[:, start : start + sampler.local_batch_size]
    numbers, positions = (
        np.take_along_axis(values, share, axis=1).ravel()
        for values in (numbers, positions)
    )
    return numbers, positions


def _seeded(transform: Transform, seed: int, sample: Any, position: tf.Tensor) -> Any:
    return transform(sample, tf.stack([tf.constant(seed, tf.int64), position]))


class _Reader:
    """Reads the samples that `deal(first, last)` deals to this rank for some steps.

    `deal` returns their numbers and their positions, in the order of the steps.
    """

    def __init__(
        self,
        source: Source,
        deal: Callable[[int, int], tuple[np.ndarray, np.ndarray]],
        workers: int | None,
    ) -> None:
        if workers is not None and workers < 1:
            raise DataError(f"Received {workers} workers; expected 1 or more.")
        with contextlib.suppress(OSError):
            # The calls of NumPy take a fiftieth of the step of a small model.
            use_library(native.load().functions)
        self._source = source
        self._deal = deal
        threads = workers or tf.config.threading.get_intra_op_parallelism_threads()
        # 0 threads are as many as there are cores.
        threads = threads or len(os.sched_getaffinity(0))
        # Without `workers`, a rank of one thread reads when it needs a batch: a thread
        # that reads ahead would compete with the step for the core.
        self._is_ahead = bool(workers) or source.is_remote or has_spare_thread()
        self._calls = threads if self._is_ahead else None
        # An evaluation may read the same object while batches are read ahead.
        # In one order: two sources may share some of the objects.
        self._locks = [] if (workers or 0) > 1 else sorted(source.locks, key=id)
        self._reading_calls = None if self._locks else self._calls
        if source.is_remote and not workers and not self._locks:
            # They wait for the store more than they compute.
            self._reading_calls = max(threads, _REMOTE_CALLS)

    def read(
        self,
        steps: range,
        *,
        local_batch_size: int,
        transform: Transform | None = None,
        is_exact: bool = True,
    ) -> tf.data.Dataset:
        """Return the batches of `steps`.

        Args:
            transform: `transform(sample, position)`.
            is_exact: whether each step has `local_batch_size` samples.
        """
        numbers, _ = self._deal(steps.start, steps.start + 1)
        # One sample: from it follow the structure, and how many steps make a block.
        example = self._read_samples(numbers[:1])
        block_steps = 1
        if is_exact:
            block_steps = count_block_steps(local_batch_size * count_bytes(example))
        blocks = self._blocks(steps, block_steps, example)
        # Samples that are padded to the longest of a block would depend on the step at
        # which a job continues. Parsed samples may be larger than what was read.
        parsed_bytes = local_batch_size * _count_parsed_bytes(blocks)
        parsed_steps = count_block_steps(parsed_bytes)
        if parsed_steps < block_steps:
            block_steps = parsed_steps
            blocks = self._blocks(steps, block_steps, example)
        if transform or self._source.decode:
            # What is decoded may be much larger than what is read.
            block_steps = 1
            ready = self._transformed(blocks, transform).batch(
                local_batch_size, drop_remainder=is_exact
            )
        else:
            ready = _split(blocks, local_batch_size if is_exact else None)
        if self._is_ahead:
            ready = ready.prefetch(max(2, block_steps))
        return untuned(ready, threads=self._reading_calls)

    def _read_samples(self, numbers: np.ndarray) -> Any:
        with contextlib.ExitStack() as stack:
            for lock in self._locks:
                stack.enter_context(lock)
            samples = self._source.read(numbers)
        return tf.nest.map_structure(
            lambda values: _as_tensorflow(values, numbers[0]), samples
        )

    def _blocks(self, steps: range, block_steps: int, example: Any) -> tf.data.Dataset:
        """Return samples and their positions for `block_steps` steps at a time."""
        leaves = tf.nest.flatten(example)
        dtypes = [tf.as_dtype(leaf.dtype) for leaf in leaves]

        def read_block(first: np.int64) -> list[np.ndarray]:
            last = min(int(first) + block_steps, steps.stop)
            numbers, positions = self._deal(int(first), last)
            samples = self._read_samples(numbers)
            # What is parsed is counted later.
            count = None if self._source.parse else len(numbers)
            return [*_checked(samples, example, numbers[0], count), positions]

        def load(first: tf.Tensor) -> Any:
            *tensors, positions = tf.numpy_function(
                read_block, [first], [*dtypes, tf.int64]
            )
            # numpy_function loses the shapes, from which Keras builds layers.
            tensors = [
                tf.ensure_shape(tensor, (None, *leaf.shape[1:]))
                for tensor, leaf in zip(tensors, leaves, strict=True)
            ]
            samples = tf.nest.pack_sequence_as(example, tensors)
            return samples, tf.ensure_shape(positions, (None,))

        firsts = tf.data.Dataset.range(steps.start, steps.stop, block_steps)
        blocks = firsts.map(load, num_parallel_calls=self._reading_calls)
        if self._source.parse:
            blocks = blocks.map(self._parse, num_parallel_calls=self._calls)
        return blocks

    # AutoGraph would replace a `DataError` by an error of its own.
    @tf.autograph.experimental.do_not_convert
    def _parse(self, raw: Any, positions: tf.Tensor) -> Any:
        return parse(self._source, raw, tf.shape(positions)[0]), positions

    def _transformed(
        self, blocks: tf.data.Dataset, transform: Transform | None
    ) -> tf.data.Dataset:
        decode = self._source.decode

        def apply(sample: Any, position: tf.Tensor) -> Any:
            if decode:
                sample = decode(sample)
            return transform(sample, position) if transform else sample

        # Equal to `unbatch`, with a fifth less processor time.
        samples = blocks.flat_map(
            lambda *block: tf.data.Dataset.from_tensor_slices(block)
        )
        return samples.map(apply, num_parallel_calls=self._calls)


def _split(blocks: tf.data.Dataset, local_batch_size: int | None) -> tf.data.Dataset:
    """Return the batches of blocks of steps; None for one step of any size."""
    if local_batch_size is None:
        return blocks.map(lambda samples, positions: samples)

    def by_step(values: tf.Tensor) -> tf.Tensor:
        sizes = [(-1, local_batch_size), tf.shape(values)[1:]]
        steps = tf.reshape(values, tf.concat(sizes, axis=0))
        # Static, so that a job that continues traces the same graph.
        known = tf.TensorShape((None, local_batch_size)).concatenate(values.shape[1:])
        return tf.ensure_shape(steps, known)

    return blocks.flat_map(
        lambda samples, positions: tf.data.Dataset.from_tensor_slices(
            tf.nest.map_structure(by_step, samples)
        )
    )


def _checked(
    samples: Any, example: Any, number: int, count: int | None
) -> list[np.ndarray]:
    """Return the arrays of samples of the structure and types of one sample.

    Args:
        number: of the first sample.
        count: of the samples; None if it is not known.

    Raises:
        DataError: they differ. TensorFlow's error would name neither the samples nor
            the types.
    """
    try:
        tf.nest.assert_same_structure(samples, example)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"Received a batch from sample {number} on of other structure than the "
            f"first sample that was read: {str(error).splitlines()[0]}"
        ) from None
    leaves = tf.nest.flatten(samples)
    for value, expected in zip(leaves, tf.nest.flatten(example), strict=True):
        # Text has types of NumPy that depend on its length.
        dtypes = tf.as_dtype(value.dtype), tf.as_dtype(expected.dtype)
        shape = value.shape[:1] if count is None else (count,)
        shape += expected.shape[1:]
        if dtypes[0] != dtypes[1] or value.shape != shape:
            raise DataError(
                f"Received {dtypes[0].name} of shape {value.shape} for the samples "
                f"from {number} on; expected {dtypes[1].name} of shape {shape}, by the "
                "first sample that was read."
            )
    return leaves


def _as_tensorflow(values: np.ndarray, number: int) -> np.ndarray:
    """Return an array whose values `tf.numpy_function` keeps.

    The function ignores byte order, and takes arrays of objects with text or bytes
    alone.

    Args:
        number: of the first sample.
    """
    try:
        tf.as_dtype(values.dtype)
    except TypeError:
        raise DataError(
            f"Received an array of dtype {values.dtype} in the samples from {number} "
            "on; expected a dtype that TensorFlow has: convert it, for example by "
            'astype("float64").'
        ) from None
    for value in values.flat if values.dtype == object else ():
        if not isinstance(value, str | bytes):
            raise DataError(
                f"Received an array of dtype object with {type(value).__name__} in the "
                f"samples from {number} on; expected numbers in an array of their own "
                "dtype, text or bytes: convert it, for example by astype."
            )
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def _count_parsed_bytes(blocks: tf.data.Dataset) -> float:
    """Return the bytes of a sample in a dataset of blocks; infinity if not known."""
    samples, _ = blocks.element_spec
    shapes = [spec.shape[1:] for spec in tf.nest.flatten(samples)]
    if not all(shape.is_fully_defined() for shape in shapes):
        return math.inf
    sizes = [spec.dtype.size for spec in tf.nest.flatten(samples)]
    # The size of text is not known: 0 here.
    return sum(
        shape.num_elements() * size for shape, size in zip(shapes, sizes, strict=True)
    )


def count_block_steps(step_bytes: float) -> int:
    """Return how many steps of `step_bytes` each one call into Python reads."""
    steps = _MAX_BLOCK_BYTES // max(1, step_bytes)
    return int(min(_MAX_BLOCK_STEPS, max(1, steps)))


def has_spare_thread() -> bool:
    """Return whether batches can be made while a step is computed.

    On a rank with one thread, a prefetching thread competes with it for the core and
    evicts its cache: this costs a tenth of the time of a small model's step.
    """
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    return threads != 1 or bool(tf.config.list_physical_devices("GPU"))


def untuned(dataset: tf.data.Dataset, threads: int | None) -> tf.data.Dataset:
    """Return the dataset with a deterministic order, and without autotuning.

    Args:
        threads: number of calls at a time. TensorFlow's own pool has a thread for each
            core, and a call that waits for a file holds one.
    """
    options = tf.data.Options()
    options.deterministic = True
    # No stage has a parallelism to tune; the tuning thread costs processor time.
    options.autotune.enabled = False
    if threads and threads > len(os.sched_getaffinity(0)):
        options.threading.private_threadpool_size = threads
    return dataset.with_options(options)
