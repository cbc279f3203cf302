"""The native reduction, against NumPy and against Horovod's own.

A rank that is missing, stopped or killed is tested in tests/commands.
"""

import hashlib
import os
import pathlib
import re
import time

import horovod.tensorflow as raw
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain.collectives import transport
from hvdtrain.flight import member, ring
from hvdtrain.native import recorder

RANK, SIZE = hvd.rank(), hvd.size()
LOCAL_RANKS = hvd.allgather_object(raw.local_rank())
HOSTS = LOCAL_RANKS.count(0)
# Ranks of a host that add up shares: those of the smallest host.
LOCAL_SIZE = SIZE // HOSTS
# Elements of 4 bytes: up to which a rank sends its share to its peers with its call;
# from which on shares go in a ring; of one window of it.
GATHERED = LOCAL_SIZE * (1 << 15) // max(1, HOSTS - 1)
IN_RING = LOCAL_SIZE * ((1 << 20) + 1)
WINDOW = LOCAL_SIZE * (1 << 22)
if HOSTS == 1:
    PATH = "shared memory"
else:
    PATH = "TCP" if HOSTS == SIZE else "shared memory and TCP"

pytestmark = [
    pytest.mark.four_ranks,
    pytest.mark.skipif(
        os.environ.get("HVDTRAIN_REDUCTION") == "horovod", reason="Horovod reduces"
    ),
]


def values_of(rank, shape, dtype="float32"):
    values = np.random.default_rng(rank).normal(scale=8.0, size=shape)
    return tf.cast(values, dtype)


def reduce(*tensors, op=hvd.Average, jit=tf.function):
    return jit(lambda: hvd.grouped_allreduce(list(tensors), op=op, name="native"))()


def operations(function):
    graph = function.get_concrete_function().graph
    return [operation.type for operation in graph.get_operations()]


def test_ranks_share_memory_or_are_connected():
    assert transport.reduction_path() == PATH
    # Rank 0 removes the file: only after that may the others look.
    hvd.allreduce(0.0, name="removed")
    files = [name for name in os.listdir("/dev/shm") if name.startswith("hvdtrain-")]
    # Each rank has the ring of its records.
    assert all(name.endswith(".ring") for name in files)


def test_a_collective_that_has_failed_is_not_in_flight():
    with pytest.raises(tf.errors.FailedPreconditionError, match="Mismatched"):
        tf.function(lambda: hvd.allreduce(tf.ones([1 + RANK])))()
    # A roll call would name it.
    assert ring.read_moment(member.ring_path()).entered is None


def test_an_eager_call_beside_one_in_a_function_is_an_error_at_once():
    call = hvd.allreduce if RANK == 0 else tf.function(hvd.allreduce)
    with pytest.raises(
        tf.errors.FailedPreconditionError, match="rank 0: eager allreduce"
    ):
        call(tf.ones(2))
    # No rank is left in a collective that describes the error.
    assert hvd.allreduce(1.0, op=hvd.Sum) == SIZE


@pytest.mark.parametrize("elements", [0, 1, 5000, 140_000, 700_001])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_an_eager_sum_of_tensors_of_any_size(dtype, elements):
    # Small integers, whose sums are exact.
    values = [tf.cast(tf.range(n) % 7 + RANK, dtype) for n in (elements, 3)]
    sums = hvd.grouped_allreduce(values, op=hvd.Sum)
    for n, total in zip((elements, 3), sums, strict=True):
        expected = SIZE * (np.arange(n) % 7) + SIZE * (SIZE - 1) // 2
        np.testing.assert_array_equal(tf.cast(total, "float64"), expected)


def test_waiting_for_another_rank_is_time_in_collectives():
    tensor = tf.ones(8)
    reduce(tensor)  # traced
    before = recorder.seconds_in_collectives()
    start = time.perf_counter()
    if RANK == 0:
        time.sleep(0.3)  # the delay that the others measure
    reduce(tensor)
    waited = recorder.seconds_in_collectives() - before
    elapsed = time.perf_counter() - start
    if RANK == 0:
        assert 0 < waited <= elapsed - 0.3
    else:
        assert elapsed / 2 < waited <= elapsed


# A chunk of 1 MiB has 1 << 17 elements: sizes below, at and above it, and some that do
# not divide into equal parts.
@pytest.mark.parametrize(
    "elements", [1, 3, (1 << 17) - 1, 1 << 17, (1 << 17) + 1, 1_000_003]
)
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_every_element_is_reduced(elements, op):
    (reduced,) = reduce(values_of(RANK, elements, "float64"), op=op)
    total = sum(values_of(rank, elements, "float64") for rank in range(SIZE))
    expected = total / SIZE if op == hvd.Average else total
    np.testing.assert_allclose(reduced, expected, rtol=1e-14, atol=1e-14)


# All of these sums are exact.
@pytest.mark.parametrize(
    ("dtype", "elements"),
    [
        ("int32", GATHERED),
        ("float32", GATHERED + LOCAL_SIZE),
        ("float32", IN_RING - 2 * LOCAL_SIZE),
        ("int32", IN_RING),
        ("int64", IN_RING // 2 + 77),
        ("float64", IN_RING // 2 + 65_537),
        ("float32", WINDOW + (1 << 16) + 1),
        ("float16", 2 * IN_RING + 3),
        ("bfloat16", 33),
    ],
)
def test_sums_of_all_sizes_are_exact_and_equal_on_all_ranks(dtype, elements):
    # Small numbers that differ by rank and by place, with a period that no block has.
    inputs = [(np.arange(13) * (rank + 3)) % 13 - 6 for rank in range(SIZE)]
    mine = tf.cast(np.resize(inputs[RANK], elements), dtype)
    (reduced,) = reduce(mine, op=hvd.Sum)
    expected = np.resize(sum(inputs), elements)
    assert np.array_equal(tf.cast(reduced, tf.int64), expected)


# The second of these tensors is in two windows.
LENGTHS = [WINDOW - 1001, 5003, 1, 70_001]


def patterns(rank):
    """For each of these tensors, small integers that it repeats."""
    return [(np.arange(13) * (rank + 3) + place) % 13 - 6.0 for place in range(4)]


def repeated(values):
    pairs = zip(values, LENGTHS, strict=True)
    return [np.resize(each, length).astype("float32") for each, length in pairs]


def sums_of_patterns():
    return [sum(each) for each in zip(*map(patterns, range(SIZE)), strict=True)]


@pytest.mark.skipif(HOSTS == 1, reason="between hosts")
@pytest.mark.parametrize(("op", "divisor"), [(hvd.Sum, 1), (hvd.Average, SIZE)])
def test_a_tensor_in_two_windows(op, divisor):
    reduced = reduce(*map(tf.constant, repeated(patterns(RANK))), op=op)
    expected = repeated([each / divisor for each in sums_of_patterns()])
    for tensor, values in zip(reduced, expected, strict=True):
        # Each host and the sum of them round a mean.
        error = np.abs(tensor.numpy() - values).max()
        assert error <= (0 if op == hvd.Sum else 2e-6)


@pytest.mark.skipif(HOSTS == 1, reason="between hosts")
def test_shards_of_tensors_in_two_windows():
    tensors = [tf.constant(each) for each in repeated(patterns(RANK))]
    # The last rank holds the remainders, and all of the tensor with one element.
    sizes = [
        [*[length // SIZE] * (SIZE - 1), length // SIZE + length % SIZE]
        for length in LENGTHS
    ]
    reduction = transport.Reduction(op=hvd.Sum)
    shards = tf.function(
        lambda: transport.reduce_to_shards(tensors, sizes, reduction, name="shards"),
        autograph=False,  # which takes seconds
    )()
    for shard, size_by_rank, total in zip(
        shards, sizes, repeated(sums_of_patterns()), strict=True
    ):
        start = sum(size_by_rank[:RANK])
        assert np.array_equal(shard, total[start : start + size_by_rank[RANK]])


@pytest.mark.skipif(HOSTS == 1, reason="between hosts")
def test_rounded_sums_in_a_ring_have_the_same_bits_on_all_ranks():
    (reduced,) = reduce(values_of(RANK, IN_RING, "float32"))
    digest = hashlib.sha256(reduced.numpy().tobytes()).digest()
    everyones = hvd.allgather(tf.constant(list(digest))[tf.newaxis])
    np.testing.assert_array_equal(everyones, np.repeat(everyones[:1], SIZE, axis=0))


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [("float64", 1e-14), ("float32", 1e-6), ("float16", 2**-11), ("bfloat16", 2**-8)],
)
def test_dtypes_are_rounded_once_within_a_host(dtype, tolerance):
    # More than a chunk of each, in parts that end within a cache line.
    elements = 600_011
    (reduced,) = reduce(values_of(RANK, elements, dtype))
    assert reduced.dtype == dtype
    inputs = [values_of(rank, elements, dtype) for rank in range(SIZE)]
    exact = np.array([tf.cast(value, tf.float64) for value in inputs])
    # Each host sends the rounded sum of its ranks, divided by a number that is the same
    # for all hosts. Only a host with a single rank among larger ones rounds for that.
    firsts = [rank for rank, number in enumerate(LOCAL_RANKS) if number == 0]
    sums = np.add.reduceat(exact, firsts, axis=0)
    expected = tf.cast(tf.cast(sums, dtype), tf.float64).numpy().sum(axis=0) / SIZE
    np.testing.assert_allclose(
        tf.cast(reduced, tf.float64), expected, rtol=tolerance, atol=tolerance
    )


def test_a_mean_is_in_the_range_of_its_values():
    # The sum of two is above the largest float16.
    (reduced,) = reduce(tf.fill([3], tf.constant(40_000, tf.float16)))
    np.testing.assert_array_equal(reduced, np.full(3, 40_000, "float16"))


def test_tensors_of_a_list_keep_their_shapes_and_places():
    shapes = [(2, 3), (), (0, 4), (5,), (1000, 400), (1,)]
    reduced = reduce(*(values_of(RANK, shape) for shape in shapes))
    for tensor, shape in zip(reduced, shapes, strict=True):
        expected = np.mean([values_of(r, shape) for r in range(SIZE)], axis=0)
        assert tensor.shape == shape
        np.testing.assert_allclose(tensor, expected, rtol=1e-5, atol=1e-6)


def test_result_is_that_of_horovod_and_bitwise_equal_on_all_ranks():
    (reduced,) = reduce(values_of(RANK, 300_000))
    by_horovod = raw.allreduce(values_of(RANK, 300_000))
    np.testing.assert_allclose(reduced, by_horovod, rtol=1e-5, atol=1e-6)
    everyones = hvd.allgather(tf.bitcast(reduced, tf.int32)[tf.newaxis])
    np.testing.assert_array_equal(everyones, np.repeat(everyones[:1], SIZE, axis=0))


def test_constant_input_is_reduced_in_every_call():
    other = tf.Variable(0.0)

    @tf.function
    def total():
        # On rank 0 alone the input is a constant of the graph.
        mine = tf.constant(1.0) if RANK == 0 else other.read_value()
        return hvd.allreduce(mine, op=hvd.Sum)

    assert total() == 1.0
    other.assign(2.0)
    assert total() == 1.0 + 2.0 * (SIZE - 1)


def test_unused_result_is_reduced_all_the_same():
    # One rank uses the result, the others do not. Pruned there, it would block.
    @tf.function
    def step(x):
        unused = hvd.allreduce(x, op=hvd.Sum, name="unused")
        return unused if RANK == 0 else tf.constant(float(SIZE))

    assert step(tf.constant(1.0)) == SIZE


def test_input_that_is_used_elsewhere_is_not_overwritten():
    @tf.function
    def step(x):
        doubled = 2.0 * x
        return doubled, hvd.allreduce(doubled, op=hvd.Sum), doubled + 0.0

    before, total, after = step(tf.fill([1000], float(RANK + 1)))
    np.testing.assert_array_equal(before, np.full(1000, 2.0 * (RANK + 1)))
    np.testing.assert_array_equal(after, before)
    np.testing.assert_array_equal(total, np.full(1000, SIZE * (SIZE + 1.0)))


def test_order_holds_in_loops_and_branches():
    @tf.function
    def nested(x):
        for i in tf.range(5):
            if i % 2 == 0:
                x = hvd.allreduce(x, name="even")
            else:
                x = 2.0 * hvd.allreduce(x, name="odd") + float(RANK)
        return x

    x = np.arange(SIZE) * 1.0
    for i in range(5):
        x = np.full(SIZE, x.mean()) if i % 2 == 0 else 2 * x.mean() + np.arange(SIZE)
    np.testing.assert_allclose(nested(tf.constant(float(RANK))), x[RANK], rtol=1e-6)


def test_reduction_is_not_ordered_after_other_stateful_operations():
    # A backward pass may have some, and would not overlap with the reduction.
    @tf.function
    def step(x):
        unrelated = tf.numpy_function(lambda: np.float32(1.0), (), tf.float32)
        return unrelated, hvd.allreduce(x, op=hvd.Sum)

    graph = step.get_concrete_function(tf.constant(1.0)).graph
    waiting = [op for op in graph.get_operations() if op.type == "HvdtrainAllreduce"]
    before = set()
    while waiting:
        operation = waiting.pop()
        before.add(operation.type)
        waiting += operation.control_inputs + [each.op for each in operation.inputs]
    assert "ReadVariableOp" in before
    assert "PyFunc" not in before
    assert step(tf.constant(1.0))[1] == SIZE


def test_shape_that_changes_is_reduced_anew():
    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def total(x):
        return hvd.allreduce(x, op=hvd.Sum)

    for rows in (1, 300_000, 3):
        np.testing.assert_array_equal(
            total(tf.ones([rows, 2])), np.full([rows, 2], SIZE)
        )


@pytest.mark.parametrize(
    "call",
    [
        lambda: hvd.allreduce(tf.ones([2 + RANK]), name="mine"),
        lambda: hvd.grouped_allreduce(
            [tf.ones([2]), tf.ones([2], tf.float64)][: 1 + (RANK == 0)], name="longer"
        ),
        lambda: hvd.allreduce(tf.ones([2]), name=f"of_rank_{RANK}"),
        lambda: hvd.allreduce(tf.ones([2], tf.float64 if RANK else tf.float32)),
        lambda: hvd.allreduce(tf.ones([2]), op=hvd.Sum if RANK else hvd.Average),
        lambda: hvd.allreduce(tf.ones([2]), op=hvd.Max if RANK else hvd.Sum),
        lambda: (hvd.allgather if RANK else hvd.allreduce)(tf.ones([2])),
        lambda: (hvd.alltoall if RANK else hvd.allreduce)(tf.ones([SIZE])),
        lambda: hvd.allreduce(
            tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([2, 2]))
            if RANK
            else tf.ones([2, 2])
        ),
    ],
)
def test_calls_that_differ_fail_on_all_ranks_and_are_named(call):
    with pytest.raises(tf.errors.FailedPreconditionError, match="Mismatched") as info:
        tf.function(call)()
    assert all(f"rank {rank}: " in str(info.value) for rank in range(SIZE))
    # Nothing is left behind: the next collectives are matched.
    assert reduce(tf.constant(1.0), op=hvd.Sum) == [SIZE]
    assert hvd.allreduce(tf.constant(1.0), op=hvd.Sum) == SIZE


def test_the_error_shows_the_first_of_many_tensors_that_differs():
    lengths = [1000 + place for place in range(200)]
    lengths[157] = 7 + RANK
    values = [tf.ones([length]) for length in lengths]
    with pytest.raises(tf.errors.FailedPreconditionError) as info:
        tf.function(lambda: hvd.grouped_allreduce(values))()
    sent = str(info.value).split("rank ")[1:]
    for rank in range(SIZE):
        assert re.search(
            rf"\[1000\].* more, alike\) \[{7 + rank}\] \[1158\]", sent[rank]
        )


def test_what_is_not_covered_goes_through_horovod():
    def types(op, dtype):
        return operations(
            tf.function(lambda: hvd.allreduce(tf.ones([3], dtype), op=op))
        )

    assert "HvdtrainAllreduce" in types(hvd.Average, tf.float32)
    assert "HvdtrainAllreduce" not in types(hvd.Max, tf.float32)
    assert "HvdtrainAllreduce" in types(hvd.Average, tf.int32)
    assert "HvdtrainAllreduce" not in types(hvd.Sum, tf.uint8)


def no_connection(between=lambda: None):
    """Leave the job and join it anew: no rank is connected yet."""
    if hvd.mpi_enabled():
        pytest.skip("MPI can be initialized only once")
    hvd.shutdown()
    between()
    hvd.init()


def test_function_of_an_earlier_job_is_connected_anew():
    @tf.function
    def total(x):
        return hvd.allreduce(x, op=hvd.Sum)

    def call_outside_of_a_job():
        error = tf.errors.FailedPreconditionError
        with pytest.raises(error, match=r"call hvd.init\(\)"):
            total(tf.constant(1.0))

    assert total(tf.constant(1.0)) == SIZE
    no_connection(between=call_outside_of_a_job)
    if RANK == 0:
        # This rank connects before it calls the function.
        assert transport.reduction_path() == PATH
    assert total(tf.constant(2.0)) == 2 * SIZE
    # The memory of the earlier job is gone; the records stay.
    mapped = pathlib.Path("/proc/self/maps").read_text().splitlines()
    names = [line for line in mapped if "/hvdtrain-" in line and ".ring" not in line]
    assert len(names) == 1


def test_forked_process_does_not_leave_the_job_for_its_rank():
    reduce(tf.constant(1.0))
    child = os.fork()
    if child == 0:
        transport.disconnect()  # as Python does when it exits
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert reduce(tf.constant(1.0), op=hvd.Sum) == [SIZE]


def test_rank_whose_first_collective_is_join():
    no_connection()
    if RANK == 0:
        assert hvd.allreduce(tf.constant(1.0), op=hvd.Sum) == 1.0
    assert hvd.join() == 0
    assert reduce(tf.constant(1.0), op=hvd.Sum) == [SIZE]


def test_large_tensors_are_reduced_after_other_ranks_have_joined():
    if RANK == SIZE - 1:
        (reduced,) = reduce(tf.range(5_000_000), op=hvd.Sum)
        np.testing.assert_array_equal(reduced, np.arange(5_000_000))
    assert hvd.join() == SIZE - 1


def test_rank_that_traces_alone_before_an_eager_collective():
    no_connection()
    if RANK == 0:
        operations(tf.function(lambda: hvd.allreduce(tf.ones([2]))))
    assert hvd.broadcast(tf.constant(float(RANK)), root_rank=1) == 1.0
    assert reduce(tf.constant(1.0), op=hvd.Sum) == [SIZE]
