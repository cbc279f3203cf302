"""Files of each format, and what all batches of a source are."""

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain import data

RECORDS = (7, 12, 5)
SAMPLES = sum(RECORDS)
# More than `GAP_BYTES`: records are read alone.
RECORD_BYTES = 20_000
FRAME = 16


def write_records(directory, size=RECORD_BYTES):
    random = np.random.RandomState(0)
    for number, count in enumerate(RECORDS):
        with tf.io.TFRecordWriter(str(directory / f"part-{number}")) as writer:
            for _ in range(count):
                writer.write(random.bytes(size))
    return "part-*"


def write_array_records(directory):
    module = pytest.importorskip("array_record.python.array_record_module")
    for number, count in enumerate(RECORDS):
        writer = module.ArrayRecordWriter(
            str(directory / f"part-{number}"), "group_size:1"
        )
        for record in range(count):
            writer.write(b"%d of %d" % (record, number))
        writer.close()
    return "part-*"


def write_rows(directory):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for number, count in enumerate(RECORDS):
        rows = np.arange(count) + 100 * number
        columns = {
            "number": rows,
            "vector": [[float(row), 1.0] for row in rows],
            "text": [f"row {row}" for row in rows],
            "text.long": ["x" * row for row in rows],
        }
        parquet.write_table(
            arrow.table(columns), directory / f"part-{number}", row_group_size=4
        )
    return "part-*"


def write_images(directory):
    random = np.random.RandomState(0)
    for number, (name, count) in enumerate(zip("bac", RECORDS, strict=True)):
        (directory / name).mkdir()
        for image in range(count):
            pixels = random.randint(0, 256, (4, 4, 3), np.uint8)
            encode = tf.io.encode_jpeg if number == 1 else tf.io.encode_png
            suffix = "jpg" if number == 1 else "PNG"
            path = directory / name / f"{image}.{suffix}"
            path.write_bytes(encode(pixels).numpy())
    return ""


WRITERS = {
    "TFRecord": write_records,
    "ArrayRecord": write_array_records,
    "Parquet": write_rows,
    "ImageFolder": write_images,
}


def read(source, rank=0, size=1, epochs=2, **options):
    sampler = data.Sampler(
        num_samples=SAMPLES, global_batch_size=4, seed=1, rank=rank, size=size
    )
    batches = data.batches(source, sampler, 0, sampler.steps(epochs), **options)
    return list(batches.as_numpy_iterator())


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for batch, other in zip(found, expected, strict=True):
        tf.nest.map_structure(np.testing.assert_array_equal, batch, other)
