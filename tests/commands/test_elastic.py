"""Real elastic jobs on this machine: a worker is killed, a worker joins late."""

import json
import sys
import textwrap

import keras
import numpy as np
import pytest

from hvdtrain import data

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
    run_script(run, folder, script, hosts=hosts)


def run_script(run, folder, script, *, hosts):
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
    program = [sys.executable, str(folder / "train.py"), str(folder)]
    job = run(program, program=launcher, forked=False)
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


@pytest.mark.long
def test_a_worker_killed_in_mid_epoch(run, tmp_path):
    run_elastic(run, tmp_path, hosts="localhost:1\n127.0.0.1:1\n", event=KILL)
    assert (tmp_path / "killed").exists()
    # The last commit before the loss was after batch 1 of epoch 1. The remaining rank
    # trains on every later batch once, at half the learning rate.
    steps = read_steps(tmp_path, "localhost-0")
    alone = [(epoch, batch) for size, epoch, batch in steps if size == 1]
    assert alone == EVERY_BATCH[8:]
    check_result(tmp_path, "localhost-0", size=1, rates=[2 * RATE] * 8 + [RATE] * 10)


@pytest.mark.release
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


# Seven samples a step: 4 and 3 on two ranks.
JOB = """
    import json
    import os
    import signal
    import sys
    import time
    from pathlib import Path

    import numpy as np

    from hvdtrain import job

    GLOBAL_BATCH_SIZE, STEPS, folder = 7, 30, Path(sys.argv[1])
    world = job.start()
    import keras
    import tensorflow as tf

    from hvdtrain import data, training

    x = np.random.default_rng(0).normal(size=(50, 4)).astype("float32")
    y = x.sum(1, keepdims=True)
    worker = os.environ["HOROVOD_HOSTNAME"] + "-" + os.environ["HOROVOD_LOCAL_RANK"]


    def model_fn():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
        return model


    def train(world, commits):
        sampler = data.Sampler(
            num_samples=50,
            global_batch_size=7,
            seed=0,
            rank=world.rank,
            size=world.size,
        )

        class Events(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                step = int(self.model.optimizer.iterations)
                with (folder / f"steps.{worker}").open("a") as file:
                    samples = sampler.indices(step - 1, step).ravel().tolist()
                    file.write(json.dumps([world.size, step, samples]) + "\\n")
                if step == 13 and worker == "127.0.0.1-0":
                    os.kill(os.getpid(), signal.SIGKILL)
                if step == 20 and world.size == 1:
                    (folder / "new_hosts").write_text("localhost:2")
                    (folder / "new_hosts").replace(folder / "hosts")
                    while commits._state._host_messages.empty():
                        time.sleep(0.1)

        def batches(start, end):
            places = tf.data.Dataset.from_tensor_slices(sampler.indices(start, end))
            return places.map(lambda batch: (tf.gather(x, batch), tf.gather(y, batch)))

        return training.train_and_evaluate(
            model_fn,
            training.TrainSpec(
                input_fn=batches,
                max_steps=STEPS,
                pass_steps=8,
                local_batch_size=sampler.local_batch_size,
                steps_per_execution=1,
                callbacks=lambda plan: [Events()],
            ),
            training.EvalSpec(input_fn=lambda: batches(0, 1)),
            training.RunConfig(commit_every_steps=5),
            world=world,
            commits=commits,
        )


    if __name__ == "__main__" and len(sys.argv) == 2:
        result = training.run_elastic(train, world)
        weights = [w.ravel().tolist() for w in result.model.get_weights()]
        (folder / f"result.{worker}").write_text(json.dumps([weights, result.history]))
"""


@pytest.mark.long
def test_a_job_that_loses_and_gains_a_worker_computes_what_one_process_does(
    run, tmp_path
):
    hosts = "localhost:1\n127.0.0.1:1\n"
    run_script(run, tmp_path, textwrap.dedent(JOB), hosts=hosts)
    steps = read_steps(tmp_path, "localhost-0")
    # Two ranks; alone from the commit at step 10, and two again from that at step 20.
    sizes = [(size, step) for size, step, _ in steps]
    alone = [(1, step) for step in range(11, 21)]
    assert [each for each in sizes if each[0] == 1] == alone
    assert sizes[-10:] == [(2, step) for step in range(21, 31)]
    assert sizes[:12] == [(2, step) for step in range(1, 13)]
    check_samples(steps, read_steps(tmp_path, "localhost-1"))
    found = [
        json.loads((tmp_path / f"result.localhost-{slot}").read_text())
        for slot in (0, 1)
    ]
    assert found[0] == found[1]
    weights, history = found[0]
    expected, losses = one_process_of_the_job()
    np.testing.assert_allclose(np.concatenate(weights), expected, atol=1e-6)
    np.testing.assert_allclose(history["loss"], losses, rtol=1e-5)


def check_samples(chief, joined):
    """The steps that count have each sample of their global batch once."""
    sampler = data.Sampler(num_samples=50, global_batch_size=7, seed=0)
    last = {step: samples for _, step, samples in chief}
    for _, step, samples in joined:
        last[step] = last[step] + samples
    for step in range(11, 31):
        assert sorted(last[step]) == sorted(sampler.indices(step - 1, step).ravel())


def one_process_of_the_job():
    """The weights, and the mean loss of each of four epochs."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    x = np.random.default_rng(0).normal(size=(50, 4)).astype("float32")
    sampler = data.Sampler(num_samples=50, global_batch_size=7, seed=0)
    losses = []
    for places in sampler.indices(0, 30):
        batch = x[places]
        losses.append(model.train_on_batch(batch, batch.sum(1, keepdims=True)))
        model.reset_metrics()
    weights = np.concatenate([w.ravel() for w in model.get_weights()])
    return weights, [np.mean(losses[i : i + 8]) for i in (0, 8, 16, 24)]
