"""Trains on files of every format, and logs which samples each step has read.

reading_program.py DIRECTORY SOURCES [--model_dir=...] trains on one source after the
other, of files in DIRECTORY/files, which `reading_program.py DIRECTORY write` makes.
For each source each rank logs to a file of its own in DIRECTORY.
"""

import contextlib
import itertools
import json
import pathlib
import struct
import sys
import uuid

import numpy as np
from absl import flags

from hvdtrain import data, job, program, training

SAMPLES, GLOBAL_BATCH_SIZE, EPOCHS = 1200, 12, 3

SCALE = flags.DEFINE_bool("scale_batch", False, "Keep the batch of a rank.")
MODEL_DIR = flags.DEFINE_string("model_dir", None, "Checkpoints.")
LEAVE_AT = flags.DEFINE_list(
    "leave_at", [], "The step at which each training is left, as by a kill."
)
_read = []


class LeftError(Exception):
    """Ends a training without any of its cleaning up."""


class Numbers:
    """A sequence that is read sample by sample."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return np.int64(index)


def write_files(directory):
    """Write each sample, which is its number, to a file of each format."""
    import pyarrow
    import pyarrow.parquet
    import tensorflow as tf
    from array_record.python.array_record_module import ArrayRecordWriter

    directory.mkdir()
    records = [struct.pack("<q", number) for number in range(SAMPLES)]
    for part in range(3):
        numbers = range(part * SAMPLES // 3, (part + 1) * SAMPLES // 3)
        name = str(directory / f"part-{part}")
        array_record = ArrayRecordWriter(f"{name}.arrayrecord", "group_size:1")
        with tf.io.TFRecordWriter(f"{name}.tfrecord") as file:
            for number in numbers:
                file.write(records[number])
                array_record.write(records[number])
        array_record.close()
        pyarrow.parquet.write_table(
            pyarrow.table({"id": np.array(numbers)}),
            f"{name}.parquet",
            row_group_size=64,
        )
    for number in range(SAMPLES):
        folder = directory / "images" / f"class-{4 * number // SAMPLES}"
        folder.mkdir(parents=True, exist_ok=True)
        pixel = np.array([[(*divmod(number, 256), 0)]], np.uint8)
        (folder / f"{number:04}.png").write_bytes(tf.io.encode_png(pixel).numpy())


def open_source(name, directory):
    """Return the source; `get_ids(sample)` returns the numbers that it has read."""
    import tensorflow as tf

    def parse(records):
        return tf.io.decode_raw(records, tf.int64)[:, 0]

    tfrecord = data.TFRecord(f"{directory}/*.tfrecord", parse)
    array_record = data.ArrayRecord(f"{directory}/*.arrayrecord", parse)
    parquet = data.Parquet(
        f"{directory}/*.parquet", parse=lambda columns: columns["id"]
    )
    tokens = np.arange(4 * SAMPLES)
    if name == "formats":
        return {
            "array": np.arange(SAMPLES),
            "sequence": Numbers(),
            "tfrecord": tfrecord,
            "array_record": array_record,
            "images": data.ImageFolder(f"{directory}/images"),
            "packed": data.pack(tokens, 4),
        }
    if name == "parquet":
        return parquet
    others = data.ArrayRecord(
        f"{directory}/*.arrayrecord", lambda records: parse(records) + SAMPLES
    )
    return data.mix([(parquet, 0.7), (others, 0.3)])


def ids_of(batch):
    """Return the numbers of a batch, as one column for each format."""
    import tensorflow as tf

    if not isinstance(batch, dict):
        return batch[:, None]
    pixels = tf.cast(batch["images"][0][:, 0, 0], tf.int64)
    first_tokens = tf.cast(batch["packed"]["tokens"][:, 0], tf.int64)
    columns = [
        batch[name] for name in ("array", "sequence", "tfrecord", "array_record")
    ]
    columns += [256 * pixels[:, 0] + pixels[:, 1], first_tokens // 4]
    return tf.stack(columns, axis=1)


def main(arguments):
    directory, names = pathlib.Path(arguments[0]), arguments[1].split(",")
    world = job.start(seed=1)
    steps = map(int, LEAVE_AT.value)
    for name, step in itertools.zip_longest(names, steps):
        with contextlib.suppress(LeftError):
            train(directory, name, world, leave_at=step)


def train(directory, name, world, leave_at):
    import keras
    import tensorflow as tf

    import hvdtrain.keras as hvd

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, batch, training=False):
            ids = ids_of(batch)
            if training:
                with tf.control_dependencies(
                    [tf.numpy_function(_read.append, [ids], [])]
                ):
                    ids = tf.identity(ids)
            return self.dense(tf.cast(ids[:, :1], tf.float32) / SAMPLES)

    def make_model():
        model = Model()
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return model

    def log(plan):
        path = directory / f"read-{name}-{hvd.size()}-{uuid.uuid4().hex}.jsonl"
        position = []
        # In an elastic job, what a step has read that another rank did not complete.
        _read.clear()

        def on_batch_end(batch, logs):
            [ids] = _read
            _read.clear()
            # All formats have read the same samples.
            assert (ids == ids[:, :1]).all(), ids
            step = plan.step(position[-1], batch)
            with open(path, "a") as file:
                file.write(json.dumps([step, ids[:, 0].tolist()]) + "\n")
            if step == leave_at:
                raise LeftError

        return [
            keras.callbacks.LambdaCallback(
                on_epoch_begin=lambda epoch, logs: position.append(epoch),
                on_train_batch_end=on_batch_end,
            )
        ]

    source = open_source(name, directory / "files")
    pairs = data.map_samples(source, lambda sample: (sample, tf.constant([1.0])))
    result = training.fit(
        make_model,
        pairs,
        global_batch_size=GLOBAL_BATCH_SIZE,
        epochs=EPOCHS,
        validation=pairs,
        every_epochs=0,
        callbacks=log,
        model_dir=MODEL_DIR.value and f"{MODEL_DIR.value}/{name}",
        save_every_steps=5,
        scale_batch=SCALE.value,
        steps_per_execution=1,
        world=world,
    )
    if world.is_chief:
        print(f"read {result.step} steps from step {result.start_step}")


if __name__ == "__main__":
    if sys.argv[2:] == ["write"]:
        write_files(pathlib.Path(sys.argv[1]))
    else:
        program.run(main, page=__doc__, operands="DIRECTORY SOURCES")
