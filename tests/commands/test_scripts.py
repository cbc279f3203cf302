"""Scripts in the manner of Horovod's documentation: only the import line changes.

And a script with a mistake in it: an error, never a hang.
"""

import json
import sys
import textwrap

import pytest

HEAD = """
    import json, os, sys, time
    import numpy as np
    import tensorflow as tf
    import {module} as hvd

    hvd.init()
    tf.keras.utils.set_random_seed(hvd.rank())
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(64 * hvd.size(), 8)).astype("float32")
    labels = (inputs.sum(axis=1) > 0).astype("int64")
    inputs, labels = inputs[hvd.rank() :: hvd.size()], labels[hvd.rank() :: hvd.size()]
    dataset = tf.data.Dataset.from_tensor_slices((inputs, labels)).repeat().batch(16)
    model = tf.keras.Sequential(
        [
            tf.keras.Input((8,)),
            tf.keras.layers.Dense(16, activation="relu"),
            tf.keras.layers.Dense(2, activation="softmax"),
        ]
    )
"""

KERAS_SCRIPT = """
    opt = tf.keras.optimizers.Adam(0.005 * hvd.size())
    opt = hvd.DistributedOptimizer(
        opt, backward_passes_per_step=1, average_aggregated_gradients=True
    )
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(),
        optimizer=opt,
        metrics=["accuracy"],
    )
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(
            initial_lr=0.005 * hvd.size(), warmup_epochs=2, verbose=0
        ),
    ]
    if hvd.rank() == 0:
        path = os.path.join(sys.argv[1], "checkpoint-{{epoch}}.keras")
        callbacks.append(tf.keras.callbacks.ModelCheckpoint(path))
    history = model.fit(
        dataset, steps_per_epoch=8, callbacks=callbacks, epochs=5,
        verbose=1 if hvd.rank() == 0 else 0,
    ).history
    first, last = history["loss"][0], history["loss"][-1]
    if hvd.rank() == 0:
        hvd.load_model(os.path.join(sys.argv[1], "checkpoint-5.keras"))
"""

LOOP_SCRIPT = """
    loss_of = tf.losses.SparseCategoricalCrossentropy()
    opt = tf.optimizers.SGD(0.05 * hvd.size())
    losses = []

    @tf.function
    def training_step(images, labels, first_batch):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)
        grads = tape.gradient(loss, model.trainable_variables)
        opt.apply_gradients(zip(grads, model.trainable_variables))
        return loss

    for batch, (images, labels) in enumerate(dataset.take(40)):
        loss = training_step(images, labels, batch == 0)
        losses.append(float(hvd.allreduce(loss)))
        if batch == 0:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(opt.variables, root_rank=0)
    first, last = np.mean(losses[:8]), np.mean(losses[-8:])
"""

TAIL = """
    child = os.fork()
    if child == 0:
        sys.exit(3)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    time.sleep(hvd.rank() / 2)
    ranks = float(tf.function(lambda: hvd.allreduce(1.0, op=hvd.Sum))())
    assert (status, ranks) == (3, hvd.size()), (status, ranks)

    weights = [float(w.astype("float64").sum()) for w in model.get_weights()]
    result = {{"first": float(first), "last": float(last), "weights": weights}}
    with open(os.path.join(sys.argv[1], f"result-{{hvd.rank()}}.json"), "w") as file:
        json.dump(result, file)
"""

LONELY_SCRIPT = """
    import sys, time
    import tensorflow as tf
    import {module} as hvd

    hvd.init()

    def eager():
        return hvd.allreduce(1.0, name="lonely")

    graph = tf.function(eager)
    graph()
    if hvd.rank() != int(sys.argv[1]):
        # Not signal.pause, which returns on the SIGQUIT of a roll call.
        time.sleep(600)
    elif sys.argv[2] == "graph":
        graph()
    else:
        eager()
"""


def write(folder, *parts):
    path = folder / "script.py"
    text = "".join(textwrap.dedent(part) for part in parts)
    path.write_text(text.format(module="hvdtrain.keras"))
    return [sys.executable, str(path)]


# Two trainings that do not wait for each other: the order of their steps is that of
# the machine, hence another one on each rank.
THREADS_SCRIPT = """
    import threading

    @tf.function
    def total(x):
        return hvd.allreduce(x, op=hvd.Sum)

    def train(number):
        pauses = np.random.default_rng([hvd.rank(), number]).uniform(0, 0.002, 200)
        try:
            for step, pause in enumerate(pauses):
                time.sleep(pause)
                value = float(total(tf.constant(1000.0 * number + step)))
                if value != hvd.size() * (1000 * number + step):
                    outcomes.append("a wrong number")
            outcomes.append("done")
        except Exception as error:
            outcomes.append(str(error))

    outcomes = []
    trainings = [threading.Thread(target=train, args=[number]) for number in range(2)]
    for training in trainings:
        training.start()
    for training in trainings:
        training.join()
    refused = [text for text in outcomes if "thread" in text or "shut down" in text]
    print(len(outcomes), "trainings,", len(refused), "refused", flush=True)
"""


# In the ranks of pytest: tests/parallel/test_threads.py.
@pytest.mark.long
@pytest.mark.parametrize("reduction", ["native", "horovod"])
def test_threads_without_an_order_are_refused_at_once(run, tmp_path, reduction):
    job = run(
        [],
        program=write(tmp_path, HEAD, THREADS_SCRIPT),
        launcher="gloo",
        environment={"HVDTRAIN_REDUCTION": reduction},
    )
    said = [line for line in job.lines if "trainings" in line]
    assert said == ["2 trainings, 2 refused"] * 2, job.text


@pytest.mark.parametrize(
    ("script", "launcher"),
    [
        (KERAS_SCRIPT, "gloo"),
        pytest.param(LOOP_SCRIPT, "mpirun", marks=pytest.mark.long),
    ],
    ids=["fit", "loop"],
)
def test_a_script_of_horovods_kind(run, tmp_path, script, launcher):
    program = write(tmp_path, HEAD, script, TAIL)
    job = run([str(tmp_path)], program=program, launcher=launcher)
    assert job.returncode == 0, job.text
    results = [
        json.loads((tmp_path / f"result-{rank}.json").read_text()) for rank in (0, 1)
    ]
    assert results[0] == results[1]
    assert results[0]["last"] < 0.8 * results[0]["first"]


@pytest.mark.release
def test_a_collective_of_one_rank_is_an_error_within_the_limit(start, tmp_path):
    limits = {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "2",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "4",
    }
    # Side by side: most of it is waiting. Rank 0 coordinates, so that it is noticed in
    # another way if it is the one that is missing; Gloo's way is a patch of ours.
    program = write(tmp_path, LONELY_SCRIPT)
    cases = [
        ("gloo", 1, "graph", "native"),
        ("mpirun", 0, "eager", "native"),
        ("gloo", 1, "eager", "horovod"),
        ("mpirun", 0, "eager", "horovod"),
    ]
    jobs = []
    for launcher, rank, call, reduction in cases:
        environment = {**limits, "HVDTRAIN_REDUCTION": reduction}
        arguments = [str(rank), call]
        jobs.append(
            start(
                arguments, program=program, launcher=launcher, environment=environment
            )
        )
    for (_, rank, call, reduction), job in zip(cases, jobs, strict=True):
        assert job.wait().returncode != 0
        # Who is missing, and what; then the cause, and where it was called.
        # Eager operations are named by their type.
        name = "lonely_0" if call == "graph" else "eager allreduce"
        missing, reason = {
            "horovod": ("{}!: [HorovodGroupedAllreduce", "Horovod has been shut down"),
            "native": (
                name + " has been waited for 2 s. Missing ranks: {}.",
                f"Missing ranks: {{}} did not call {name} within",
            ),
        }[reduction]
        assert missing.format(1 - rank) in job.text
        assert reason.format(1 - rank) in job.text
        assert "a collective failed: another rank has ended or did not" in job.text
        assert "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=4 is how long" in job.text
        assert f"    {call}()\n" in job.text
        assert "Traceback" not in job.text
