"""Two disjoint process sets train two models at once, each on its own big batch."""

import keras
import oracle
import pytest

import hvdtrain.keras as hvd

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
