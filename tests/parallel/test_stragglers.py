"""One slow rank: the report names it, and what it did."""

import time

import keras
import oracle
import pytest
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain import training
from hvdtrain.job import World
from hvdtrain.native import recorder
from hvdtrain.training import EvalSpec, TrainSpec

RANK, SIZE = hvd.rank(), hvd.size()
SLOW = 1
SLEEP_SECONDS, STEPS = 0.02, 60


@pytest.fixture(autouse=True)
def _recorded():
    recorder.open_ring()
    if SIZE < 2 or not recorder.seconds_by_phase():
        pytest.skip("two ranks and the native library record arrivals")


class Keeper(list):
    on_progress = list.append


class SlowCallback(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if RANK == SLOW:
            time.sleep(SLEEP_SECONDS)


def batches(start_step, end_step, *, is_slow):
    inputs, labels = (oracle.shard(array) for array in oracle.samples())
    size = oracle.LOCAL_BATCH_SIZE
    pairs = tf.data.Dataset.from_tensors((inputs[:size], labels[:size])).repeat()

    def sleep(x, y):
        time.sleep(SLEEP_SECONDS)
        return x, y

    def slow(x, y):
        outputs = tf.numpy_function(sleep, (x, y), (x.dtype, y.dtype))
        return tuple(map(tf.ensure_shape, outputs, (x.shape, y.shape)))

    if is_slow and RANK == SLOW:
        pairs = pairs.map(slow)
    return pairs.take(end_step - start_step)


def model():
    network = oracle.build_model()
    network.compile(keras.optimizers.SGD(0.01), oracle.LOSS)
    return network


@pytest.mark.parametrize(
    "cause", [pytest.param("input", marks=pytest.mark.long), "callbacks"]
)
def test_the_report_names_rank_and_cause(cause):
    keeper = Keeper()
    training.train_and_evaluate(
        model,
        TrainSpec(
            input_fn=lambda start, end: batches(start, end, is_slow=cause == "input"),
            max_steps=STEPS,
            pass_steps=STEPS,
            local_batch_size=oracle.LOCAL_BATCH_SIZE,
            callbacks=lambda plan: [SlowCallback()] if cause == "callbacks" else [],
            steps_per_execution=1,
        ),
        EvalSpec(input_fn=None),
        world=World(RANK, SIZE),
        observers=[keeper],
    )
    assert bool(keeper) == (RANK == 0)
    if keeper:
        straggler = max((p.straggler for p in keeper), key=lambda s: s.delay)
        assert (straggler.rank, straggler.cause) == (SLOW, cause), keeper
        assert straggler.host
        first = min(range(SIZE), key=straggler.late_seconds_by_rank.__getitem__)
        assert first != SLOW
