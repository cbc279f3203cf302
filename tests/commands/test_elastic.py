"""Real elastic jobs on this machine: a worker is killed, a worker joins late."""

import json
import sys
import textwrap

import keras
import numpy as np
import pytest

STEPS_PER_EPOCH, EPOCHS = 6, 3
EVERY_BATCH = [(e, b) for e in range(EPOCHS) for b in range(STEPS_PER_EPOCH)]
RATE = 0.01

SCRIPT = """
    import json
    import os
    import signal
    import sys
    import time
    from pathlib import Path

    import keras
    import numpy as np
    import tensorflow as tf

    import hvdtrain.keras as hvd

    STEPS, EPOCHS, folder = {steps}, {epochs}, Path(sys.argv[1])
    hvd.init()
    worker = os.environ["HOROVOD_HOSTNAME"] + "-" + os.environ["HOROVOD_LOCAL_RANK"]
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.Adam({rate} * hvd.size()), name="own_name"
    )
    model.compile(optimizer, "mse", metrics=["mae"])
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")


    class Record(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.before = int(optimizer.iterations)

        def on_train_batch_end(self, batch, logs=None):
            if int(optimizer.iterations) > self.before:
                with (folder / f"steps.{{worker}}").open("a") as file:
                    file.write(json.dumps([hvd.size(), state.epoch, batch]) + "\\n")


    class Event(keras.callbacks.Callback):
        {event}

    # Made once per process: their state spans several calls of train.
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        Record(),
        Event(),
        hvd.callbacks.ConsistencyCheckCallback(4),
        hvd.callbacks.StopTogetherCallback(4),
    ]


    @hvd.elastic.run
    def train(state):
        mine = x[hvd.rank() :: hvd.size()]
        state.model.fit(
            tf.data.Dataset.from_tensors((mine, mine.sum(1, keepdims=True))).repeat(),
            steps_per_epoch={steps_per_epoch},
            epochs=EPOCHS - state.epoch,
            verbose=0,
            callbacks=[
                hvd.elastic.CommitStateCallback(state, 2),
                hvd.elastic.UpdateBatchStateCallback(state),
                hvd.elastic.UpdateEpochStateCallback(state),
                *callbacks,
            ],
        )
        return "done"


    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    result = {{
        "result": train(state),
        "size": hvd.size(),
        "iterations": int(optimizer.iterations),
        "weights": [w.ravel().tolist() for w in model.get_weights()],
    }}
    (folder / f"result.{{worker}}").write_text(json.dumps(result))
"""

KILL = """
        def on_train_batch_begin(self, batch, logs=None):
            is_time = state.epoch == 1 and batch == 3 and hvd.size() == 2
            if is_time and worker == "127.0.0.1-0":
                (folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
"""

# The lone worker blocks after BATCH until the launcher has found the second slot.
GROW = """
        def on_train_batch_end(self, batch, logs=None):
            if state.epoch == 1 and batch == BATCH and hvd.size() == 1:
                (folder / "new_hosts").write_text("localhost:2")
                (folder / "new_hosts").replace(folder / "hosts")
                while True:
                    state.check_host_updates()
                    time.sleep(0.1)
"""


def run_elastic(run, folder, *, hosts, event, steps_per_epoch="STEPS"):
    script = textwrap.dedent(SCRIPT).format(
        steps=STEPS_PER_EPOCH,
        epochs=EPOCHS,
        rate=RATE,
        steps_per_epoch=steps_per_epoch,
        event=textwrap.indent(textwrap.dedent(event), " " * 4).strip(),
    )
    (folder / "train.py").write_text(script)
    (folder / "hosts").write_text(hosts)
    discover = folder / "discover.sh"
    discover.write_text(f"#!/bin/sh\ncat '{folder}/hosts'\n")
    discover.chmod(0o755)
    launcher = [
        *("horovodrun", "--gloo", "-np", str(hosts.count(":"))),
        *("--min-np", "1", "--max-np", "2", "--network-interface", "lo"),
        *("--host-discovery-script", str(discover)),
    ]
    job = run([sys.executable, str(folder / "train.py"), str(folder)], program=launcher)
    assert job.returncode == 0, job.text


def read_steps(folder, worker):
    lines = (folder / f"steps.{worker}").read_text().splitlines()
    return [json.loads(line) for line in lines]


def one_process(rates):
    """Weights after one step on all samples with each of `rates`."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(), "mse")
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    for rate in rates:
        model.optimizer.learning_rate.assign(rate)
        model.train_on_batch(x, x.sum(1, keepdims=True))
    return [w.ravel() for w in model.get_weights()]


def check_result(folder, worker, *, size, rates):
    result = json.loads((folder / f"result.{worker}").read_text())
    assert result["result"] == "done"
    assert result["size"] == size
    assert result["iterations"] == len(rates)
    for mine, expected in zip(result["weights"], one_process(rates), strict=True):
        assert mine == pytest.approx(expected, abs=1e-5)
    return result["weights"]


def test_a_worker_killed_in_mid_epoch(run, tmp_path):
    run_elastic(run, tmp_path, hosts="localhost:1\n127.0.0.1:1\n", event=KILL)
    assert (tmp_path / "killed").exists()
    # The last commit before the loss was after batch 1 of epoch 1. The remaining rank
    # trains on every later batch once, at half the learning rate.
    steps = read_steps(tmp_path, "localhost-0")
    alone = [(epoch, batch) for size, epoch, batch in steps if size == 1]
    assert alone == EVERY_BATCH[8:]
    check_result(tmp_path, "localhost-0", size=1, rates=[2 * RATE] * 8 + [RATE] * 10)


def test_a_worker_that_joins_late(run, tmp_path):
    event = GROW.replace("BATCH", "2")
    run_elastic(run, tmp_path, hosts="localhost:1\n", event=event)
    # No batch is lost or repeated. The new worker starts at the tenth batch, with the
    # state of an optimizer that it has not trained.
    together = EVERY_BATCH[9:]
    check_growth(tmp_path, alone=EVERY_BATCH[:9], together=together)


def test_a_worker_that_joins_late_in_an_epoch(run, tmp_path):
    event = GROW.replace("BATCH", "4")
    run_elastic(
        run,
        tmp_path,
        hosts="localhost:1\n",
        event=event,
        steps_per_epoch="STEPS // hvd.size()",
    )
    # 5 of 6 batches of one rank are 2.5 of 3 batches of two ranks, rounded down.
    together = [(1, 2), (2, 0), (2, 1), (2, 2)]
    check_growth(tmp_path, alone=EVERY_BATCH[:11], together=together)


def check_growth(folder, *, alone, together):
    steps = [tuple(step) for step in read_steps(folder, "localhost-0")]
    after = [(2, *place) for place in together]
    assert steps == [(1, *place) for place in alone] + after
    assert [tuple(s) for s in read_steps(folder, "localhost-1")] == after
    rates = [RATE] * len(alone) + [2 * RATE] * len(together)
    weights = [
        check_result(folder, f"localhost-{slot}", size=2, rates=rates)
        for slot in (0, 1)
    ]
    assert weights[0] == weights[1]
