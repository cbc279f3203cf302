"""A real elastic job on two names of this machine, one worker killed in mid-epoch."""

import json
import sys
import textwrap

import pytest

STEPS_PER_EPOCH, EPOCHS = 6, 3

SCRIPT = """
    import json
    import os
    import signal
    import sys
    from pathlib import Path

    import keras
    import numpy as np
    import tensorflow as tf

    import hvdtrain.keras as hvd

    STEPS, EPOCHS, folder = {steps}, {epochs}, Path(sys.argv[1])
    hvd.init()
    start_size, host = hvd.size(), os.environ["HOROVOD_HOSTNAME"]
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.Adam(0.01 * start_size), name="own_name"
    )
    model.compile(optimizer, "mse")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 4)).astype("float32")
    data = tf.data.Dataset.from_tensors((x, x.sum(1, keepdims=True))).repeat()


    class Record(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            with (folder / f"steps.{{host}}").open("a") as file:
                line = [state.epoch, batch, hvd.size(), int(optimizer.iterations)]
                file.write(json.dumps(line) + "\\n")

        def on_train_batch_begin(self, batch, logs=None):
            victim = state.epoch == 1 and batch == 3 and hvd.size() == 2
            if victim and host == "127.0.0.1" and not (folder / "killed").exists():
                (folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)


    @hvd.elastic.run
    def train(state):
        state.model.fit(
            data,
            steps_per_epoch=STEPS,
            epochs=EPOCHS - state.epoch,
            verbose=0,
            callbacks=[
                hvd.elastic.CommitStateCallback(state, 2),
                hvd.elastic.UpdateBatchStateCallback(state),
                hvd.elastic.UpdateEpochStateCallback(state),
                Record(),
            ],
        )
        return "done"


    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    result = {{
        "result": train(state),
        "size": hvd.size(),
        "iterations": int(optimizer.iterations),
        "learning_rate": float(optimizer.learning_rate),
        "weights": [w.ravel().tolist() for w in model.get_weights()],
    }}
    (folder / f"result.{{host}}").write_text(json.dumps(result))
"""


def test_a_worker_killed_in_mid_epoch(run, tmp_path):
    folder = tmp_path
    (folder / "train.py").write_text(
        textwrap.dedent(SCRIPT).format(steps=STEPS_PER_EPOCH, epochs=EPOCHS)
    )
    discover = folder / "discover.sh"
    discover.write_text("#!/bin/sh\necho localhost:1\necho 127.0.0.1:1\n")
    discover.chmod(0o755)
    launcher = [
        *("horovodrun", "--gloo", "-np", "2", "--min-np", "1", "--max-np", "2"),
        *("--host-discovery-script", str(discover), "--network-interface", "lo"),
    ]
    job = run([sys.executable, str(folder / "train.py"), str(folder)], program=launcher)
    code, log = job.returncode, job.text
    assert (folder / "killed").exists(), log
    assert code == 0, log
    result = json.loads((folder / "result.localhost").read_text())
    assert result["result"] == "done"
    assert result["size"] == 1
    # Half the ranks, half the learning rate.
    assert result["learning_rate"] == pytest.approx(0.01)
    # No step is lost and none is taken twice in what remains.
    assert result["iterations"] == STEPS_PER_EPOCH * EPOCHS
    lines = (folder / "steps.localhost").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    alone = [step for step in steps if step[2] == 1]
    # The last commit before the loss was after batch 1 of epoch 1: from there on,
    # every batch of the epoch is taken once, by the lone survivor.
    trained = [(epoch, batch) for epoch, batch, _, count in alone if count > 8]
    everything = [(e, b) for e in range(EPOCHS) for b in range(STEPS_PER_EPOCH)]
    assert trained == everything[8:]
