"""Each diff of docs/moving/distribute.md computes on ranks what a strategy computes."""

import contextlib
import os
import pickle
import subprocess
import sys

import keras
import mirrored
import numpy as np
import oracle
import pytest
import tensorflow as tf

import hvdtrain.keras as hvd

pytestmark = [
    # Seconds, and what the diffs call has tests of its own.
    pytest.mark.long,
    pytest.mark.skipif(hvd.size() != 2, reason="the strategy has two devices"),
]


@contextlib.contextmanager
def strategy(file):
    """Start a process that writes what the strategy computes; yield what waits for it.

    It is a process of its own, since devices are divided before TensorFlow starts.
    """
    launched = ("HOROVOD_", "OMPI_", "PMI")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(launched)}
    command = [sys.executable, mirrored.__file__, str(file)]
    process = subprocess.Popen(
        command,
        cwd=file.parent,
        env=kept,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )

    def wait():
        _, text = process.communicate(timeout=240)
        assert process.returncode == 0, text
        return pickle.loads(file.read_bytes())

    with process:
        try:
            yield wait
        finally:
            process.kill()


def test_every_diff(tmp_path, monkeypatch):
    with contextlib.ExitStack() as stack:
        if hvd.rank() == 0:
            wait = stack.enter_context(strategy(tmp_path / "expected.pickle"))
        directory = tmp_path / "ranks"
        directory.mkdir()
        monkeypatch.chdir(hvd.broadcast_object(directory, name="directory"))
        namespace = mirrored.names(keras, tf) | {"hvd": hvd}
        scripts = [script for _, script in mirrored.sides()]
        found = [mirrored.run(script, namespace) for script in scripts]
        for _, weights in found:
            oracle.assert_bitwise_equal_over_ranks(weights)
        expected = hvd.broadcast_object(wait() if hvd.rank() == 0 else None, name="all")
    assert len(found) > 10
    for script, computed, wanted in zip(scripts, found, expected, strict=True):
        assert oracle.difference(computed[1], wanted[1]) < 1e-6, script
        assert (computed[0] is None) == (wanted[0] is None), script
        if wanted[0] is not None:
            np.testing.assert_allclose(
                computed[0], wanted[0], rtol=2e-6, err_msg=script
            )
