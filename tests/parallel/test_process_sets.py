"""Two disjoint process sets train two models at once, each on its own big batch."""

import keras
import oracle
import pytest
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain.keras.consistency import check_consistency
from hvdtrain.keras.metrics import reduce_metrics

pytestmark = pytest.mark.ranks
RANK, SIZE = hvd.rank(), hvd.size()


@pytest.fixture
def halves():
    """The lower and the upper ranks as process sets; the number of this rank's."""
    middle = (SIZE + 1) // 2
    ranks = [list(range(middle)), list(range(middle, SIZE))]
    sets = [hvd.add_process_set(members) for members in ranks]
    yield sets, int(middle <= RANK)
    for process_set in sets:
        hvd.remove_process_set(process_set)


def optimizers(number):
    """Each set trains with an optimizer of its own."""
    if number == 0:
        return keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.3)
    return keras.optimizers.Adam(0.02)


@pytest.mark.four_ranks
@pytest.mark.skipif(SIZE < 2, reason="two sets need two ranks")
def test_two_models_at_once(halves):
    sets, number = halves
    mine = sets[number]
    inputs, labels = oracle.samples(steps=8)
    global_batch_size = oracle.LOCAL_BATCH_SIZE * mine.size()
    # Same data for both sets, cut into batches of each set's own size.
    samples = 8 * global_batch_size
    inputs, labels = inputs[:samples], labels[:samples]
    expected = oracle.train_by_fit(
        optimizers(number), inputs, labels, global_batch_size
    ).get_weights()

    model = oracle.train_by_fit(
        hvd.DistributedOptimizer(optimizers(number), process_set=mine),
        inputs[mine.rank() :: mine.size()],
        labels[mine.rank() :: mine.size()],
        oracle.LOCAL_BATCH_SIZE,
    )
    assert oracle.difference(model.get_weights(), expected) < 1e-6
    weights = hvd.allgather_object(
        [w.tobytes() for w in model.get_weights()], process_set=mine
    )
    assert all(theirs == weights[0] for theirs in weights)


@pytest.mark.skipif(SIZE < 2, reason="two sets need two ranks")
def test_collectives_of_a_set(halves):
    sets, number = halves
    mine = sets[number]
    members = mine.ranks
    mean = sum(members) / len(members)
    assert float(hvd.allreduce(float(RANK), process_set=mine)) == pytest.approx(mean)
    gathered = hvd.allgather([RANK], process_set=mine)
    assert list(gathered.numpy()) == members
    assert int(hvd.broadcast(RANK, members[-1], process_set=mine)) == members[-1]
    assert hvd.broadcast_object(RANK, members[0], process_set=mine) == members[0]
    variable = keras.Variable(float(RANK))
    hvd.broadcast_variables([variable], members[0], process_set=mine)
    assert float(variable) == members[0]
    assert hvd.global_process_set.size() == SIZE


class StopAtFourthBatch(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training |= batch == 3


@pytest.mark.four_ranks
@pytest.mark.skipif(SIZE < 3, reason="a set of two ranks beside another one")
def test_callbacks_act_within_a_set(halves):
    sets, number = halves
    mine = sets[number]
    inputs, labels = oracle.samples(steps=8)
    samples = 8 * oracle.LOCAL_BATCH_SIZE * mine.size()
    inputs, labels = inputs[:samples], labels[:samples]
    # The last rank of the lower set wishes to stop: its whole set does, no other.
    stops = sets[0].ranks[-1] == RANK
    taken = samples if number else samples * 6 // 8
    expected = oracle.train_by_fit(
        optimizers(number),
        inputs[:taken],
        labels[:taken],
        oracle.LOCAL_BATCH_SIZE * mine.size(),
        metrics=["accuracy"],
    )

    model = oracle.build_model()
    if mine.ranks[0] != RANK:
        model.set_weights([weight + 1.0 for weight in model.get_weights()])
    model.compile(
        hvd.DistributedOptimizer(optimizers(number), process_set=mine),
        oracle.LOSS,
        metrics=["accuracy"],
    )
    history = oracle.fit(
        model,
        inputs[mine.rank() :: mine.size()],
        labels[mine.rank() :: mine.size()],
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(mine.ranks[0]),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.ConsistencyCheckCallback(every_steps=2),
            *([StopAtFourthBatch()] if stops else []),
            hvd.callbacks.StopTogetherCallback(every_steps=3),
        ],
    ).history
    assert oracle.difference(model.get_weights(), expected.get_weights()) < 1e-6
    for name, values in expected.history.history.items():
        assert history[name] == pytest.approx(values, rel=1e-5)


@pytest.mark.skipif(SIZE < 3, reason="a set of two ranks beside another one")
def test_drift_within_a_set_is_found_and_names_the_ranks_of_the_job(halves):
    sets, number = halves
    mine = sets[number]
    check_consistency([keras.Variable(float(number))], process_set=mine)
    if mine.size() > 1:
        words = f"rank {mine.ranks[0]} and rank {mine.ranks[1]} hold different"
        with pytest.raises(hvd.callbacks.DesynchronizedError, match=words):
            check_consistency([keras.Variable(float(RANK))], process_set=mine)


@pytest.mark.skipif(SIZE < 3, reason="a set of two ranks beside another one")
def test_the_root_of_a_broadcast_is_one_of_the_set(halves):
    sets, number = halves
    mine, other = sets[number], sets[1 - number]
    if mine.size() == 1:
        pytest.skip("alone in its set")
    model = oracle.build_model()
    model.compile(
        hvd.DistributedOptimizer(optimizers(number), process_set=mine), oracle.LOSS
    )
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(other.ranks[0])
    with pytest.raises(ValueError, match="root_rank must be one of the ranks"):
        model.fit(*oracle.samples(1), verbose=0, callbacks=[broadcast])


@pytest.mark.skipif(SIZE < 2, reason="somebody must be outside")
def test_callbacks_leave_a_rank_alone_that_is_outside_of_the_set(halves):
    (lower, _), number = halves
    model = oracle.build_model()
    model.compile(
        hvd.DistributedOptimizer(optimizers(0), process_set=lower), oracle.LOSS
    )
    before = model.get_weights()
    if number == 1:
        model.optimizer.learning_rate = 0.0
    history = model.fit(
        *oracle.samples(1),
        verbose=0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.ConsistencyCheckCallback(every_steps=1),
        ],
    ).history
    assert set(history) == {"loss"}
    assert (oracle.difference(model.get_weights(), before) == 0) == (number == 1)


@pytest.mark.skipif(SIZE < 2, reason="two sets need two ranks")
@pytest.mark.parametrize("wrap", [lambda step: step, tf.function])
def test_a_set_before_everybody_in_one_function(halves, wrap):
    sets, number = halves

    @wrap
    def step(x):
        if number == 0:
            x = hvd.allreduce(x, op=hvd.Sum, process_set=sets[0])
        return hvd.allreduce(x, op=hvd.Sum)

    lower, upper = sets[0].size(), SIZE - sets[0].size()
    assert float(step(tf.constant(1.0))) == lower * lower + upper


@pytest.mark.four_ranks
@pytest.mark.skipif(SIZE != 4, reason="two rows and two columns of ranks")
def test_a_sum_over_rows_and_columns_counts_every_rank_once():
    rows = [hvd.add_process_set([0, 1]), hvd.add_process_set([2, 3])]
    columns = [hvd.add_process_set([0, 2]), hvd.add_process_set([1, 3])]
    x = tf.Variable([0.0, 0.0])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(x * (1.0 + RANK))
    options = {"op": hvd.Sum, "process_set": rows[RANK // 2]}
    (gradient,) = hvd.DistributedGradientTape(tape, **options).gradient(loss, [x])
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), op=hvd.Sum, process_set=columns[RANK % 2]
    )
    optimizer.apply_gradients([(gradient, x)])
    assert x.numpy().tolist() == [-10.0, -10.0]
    for process_set in rows + columns:
        hvd.remove_process_set(process_set)


@pytest.mark.four_ranks
@pytest.mark.skipif(SIZE < 2, reason="two sets need two ranks")
def test_metrics_of_a_set(halves):
    sets, number = halves
    mine = sets[number]
    metric = keras.metrics.Mean()
    metric.update_state([float(RANK)] * (1 + mine.rank()))
    weights = [1 + place for place in range(mine.size())]
    mean = sum(w * r for w, r in zip(weights, mine.ranks, strict=True)) / sum(weights)
    assert reduce_metrics([metric], process_set=mine) == {"mean": pytest.approx(mean)}
