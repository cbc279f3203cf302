"""A job of two ranks trains on files in a store as on the same files on a disk."""

import os
import pathlib
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.stores
PROGRAM = pathlib.Path(__file__).with_name("remote_program.py")
ROOT = pathlib.Path(__file__).parents[2]


def test_weights_are_those_of_a_training_on_local_files(start, s3_bucket, tmp_path):
    import s3fs
    import tensorflow as tf

    x = np.random.RandomState(0).normal(size=(3, 9, 4)).astype("float32")
    for number, rows in enumerate(x):
        with tf.io.TFRecordWriter(str(tmp_path / f"part-{number}")) as writer:
            for row in rows:
                values = tf.train.FloatList(value=row)
                features = {"x": tf.train.Feature(float_list=values)}
                example = tf.train.Example(features=tf.train.Features(feature=features))
                writer.write(example.SerializeToString())
    s3fs.S3FileSystem().put(f"{tmp_path}/part-*", "bucket/")
    # Whose packages for stores are beside the others.
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    for name, files in {"disk": tmp_path, "store": s3_bucket}.items():
        (tmp_path / name).mkdir()
        cache = {"HVDTRAIN_CACHE_DIR": str(tmp_path / name), "PYTHONPATH": path}
        program = [sys.executable, str(PROGRAM)]
        arguments = [f"{files}/part-*", str(tmp_path / name)]
        job = start(arguments, program=program, launcher="mpirun", environment=cache)
        assert job.wait().returncode == 0, job.text
    disk, store = (
        [(tmp_path / name / f"weights-{rank}.npz").read_bytes() for rank in range(2)]
        for name in ("disk", "store")
    )
    assert store == disk
    assert store[0] == store[1]
