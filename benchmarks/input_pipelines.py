"""How fast files of small samples are read, against plain pipelines of tf.data.

The plain pipelines are the fastest found that read the same file in a random order.
They cannot continue at a step: a job that is resumed reads other samples.
"""

import dataclasses
import functools
import importlib.util
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf

from hvdtrain import data
from hvdtrain.benchmark import figures
from hvdtrain.data.sources.source import load_library

# 300 bytes each: reading and parsing take longer than copying.
_SAMPLES = 50_000
_VALUES = 64
_SHUFFLE_BUFFER = 10_000
_FEATURES = {
    "x": tf.io.FixedLenFeature((_VALUES,), tf.float32),
    "y": tf.io.FixedLenFeature((), tf.int64),
}
_ARRAY_RECORD = "array_record.python.array_record_module"

# Returns endless batches.
MakeBatches = Callable[[], tf.data.Dataset]


@dataclasses.dataclass(frozen=True)
class _Format:
    """How files of a format are written, and read: by a source, and by tf.data."""

    open_writer: Callable[[str], Any]
    make_source: Callable[..., data.Source]
    make_plain: Callable[[str, int], tf.data.Dataset]


def measure(
    *, batch_size: int, rounds: int, seconds: float, samples: int = _SAMPLES
) -> dict[str, Any]:
    """Measure the samples per second of each format whose library is installed.

    The files are temporary, and in the page cache. HVDTRAIN_CACHE_DIR is set to their
    directory: in the cache, the index of a temporary file would stay.

    Args:
        rounds: in every other round the order of the pipelines is reversed.
        seconds: of each pipeline in a round.

    Returns:
        For each format a dict of the median `samples_per_second` by pipeline,
        "data.batches" and "tf.data", and the median `ratio` of both over rounds.
    """
    result = {}
    with (
        tempfile.TemporaryDirectory() as directory,
        # No index of a temporary file stays in the cache.
        mock.patch.dict(os.environ, HVDTRAIN_CACHE_DIR=directory),
    ):
        for name, each in _formats().items():
            path = str(pathlib.Path(directory, name))
            _write(each.open_writer(path), samples)
            speeds = _run_rounds(
                {
                    "data.batches": functools.partial(_sampled, each, path, batch_size),
                    "tf.data": functools.partial(each.make_plain, path, batch_size),
                },
                rounds=rounds,
                seconds=seconds,
            )
            result[name] = {
                "samples_per_second": {
                    pipeline: batch_size * statistics.median(values)
                    for pipeline, values in speeds.items()
                },
                "ratio": figures.median_ratio(*speeds.values()),
            }
    return result


def _formats() -> dict[str, _Format]:
    formats = {
        "TFRecord": _Format(tf.io.TFRecordWriter, data.TFRecord, _plain_tfrecord)
    }
    if importlib.util.find_spec("array_record"):
        formats["ArrayRecord"] = _Format(
            lambda path: load_library(_ARRAY_RECORD, "arrayrecord").ArrayRecordWriter(
                path, "group_size:1"
            ),
            data.ArrayRecord,
            _plain_arrayrecord,
        )
    return formats


def _write(writer: Any, samples: int) -> None:
    values = np.random.RandomState(0).uniform(size=(samples, _VALUES))
    for number, row in enumerate(values):
        feature = {
            "x": tf.train.Feature(float_list=tf.train.FloatList(value=row)),
            "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[number])),
        }
        example = tf.train.Example(features=tf.train.Features(feature=feature))
        writer.write(example.SerializeToString())
    writer.close()


def _parse(records: tf.Tensor) -> Mapping[str, tf.Tensor]:
    return tf.io.parse_example(records, _FEATURES)


def _sampled(each: _Format, path: str, batch_size: int) -> tf.data.Dataset:
    source = each.make_source(path, parse=_parse)
    sampler = data.Sampler(
        num_samples=len(source),
        global_batch_size=batch_size,
        seed=0,
    )
    return data.batches(source, sampler, 0, sampler.steps(epochs=1_000_000))


def _plain_tfrecord(path: str, batch_size: int) -> tf.data.Dataset:
    records = tf.data.TFRecordDataset(path).repeat().shuffle(_SHUFFLE_BUFFER)
    batches = records.batch(batch_size, drop_remainder=True)
    return batches.map(_parse, num_parallel_calls=2).prefetch(2)


def _plain_arrayrecord(path: str, batch_size: int) -> tf.data.Dataset:
    reader = load_library(_ARRAY_RECORD, "arrayrecord").ArrayRecordReader(
        path,
        "readahead_buffer_size:0,max_parallelism:0",
        file_reader_buffer_size=1 << 15,
    )
    order = np.random.RandomState(0).permutation(reader.num_records())
    steps = len(order) // batch_size

    def read(step: np.int64) -> np.ndarray:
        first = int(step) * batch_size
        return np.array(reader.read(order[first : first + batch_size].tolist()), object)

    def load(step: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(
            tf.numpy_function(read, [step], tf.string), (batch_size,)
        )

    batches = tf.data.Dataset.range(steps).repeat().map(load, num_parallel_calls=2)
    return batches.map(_parse, num_parallel_calls=2).prefetch(2)


def _run_rounds(
    pipelines: Mapping[str, MakeBatches], *, rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Return the batches per second of each pipeline in each round."""
    speeds: dict[str, list[float]] = {name: [] for name in pipelines}
    for number in range(rounds):
        # A drift of the machine's speed cancels.
        for name in list(pipelines)[:: 1 if number % 2 == 0 else -1]:
            speeds[name].append(_time(iter(pipelines[name]()), seconds))
    return speeds


def _time(batches: Iterator[Any], seconds: float) -> float:
    # The first one fills buffers.
    next(batches)
    count, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < seconds or not count:
        next(batches)
        count += 1
    return count / spent
