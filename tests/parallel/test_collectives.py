"""The collectives as scripts call them, and calls that differ between ranks.

test_collectives_table.py compares results and gradients with NumPy.
"""

import contextlib
import functools
import itertools
import pickle
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain.collectives import objects, transport

RANK, SIZE = hvd.rank(), hvd.size()


def tensor_of(rank):
    return np.random.default_rng(rank).normal(size=(2 * SIZE, 3)).astype("float32")


def everyone():
    return [tensor_of(rank) for rank in range(SIZE)]


@pytest.mark.parametrize("kind", ["keras", "tf", "tensor", "numpy", "list", "number"])
def test_collectives_take_whatever_a_script_holds(kind):
    values = [1.0 + RANK, 2.0]
    wrap = {
        "keras": keras.Variable,
        "tf": tf.Variable,
        "tensor": tf.constant,
        "numpy": np.array,
        "list": list,
        "number": lambda v: v[0],
    }[kind]
    value = wrap(values)
    mean = (SIZE + 1) / 2
    result = hvd.allreduce(value)
    np.testing.assert_allclose(result, mean if kind == "number" else [mean, 2.0])
    received = hvd.broadcast(value, SIZE - 1)
    np.testing.assert_allclose(received, SIZE if kind == "number" else [SIZE, 2.0])
    if kind == "number":
        return
    expected = np.ravel([[1.0 + rank, 2.0] for rank in range(SIZE)])
    np.testing.assert_allclose(hvd.allgather(value), expected)
    np.testing.assert_allclose(hvd.grouped_allgather([value, value])[1], expected)


def test_average_argument_of_older_scripts():
    assert hvd.allreduce(1.0 + RANK, average=False) == SIZE * (SIZE + 1) / 2
    assert hvd.allreduce(1.0 + RANK, average=True) == (SIZE + 1) / 2


@pytest.mark.ranks
def test_tensors_without_elements_and_a_large_one_after_them():
    for shape in ([7, 0], [0, 3]):
        x = tf.zeros(shape)
        rows, columns = shape
        assert hvd.allreduce(x).shape == hvd.broadcast(x, 0).shape == shape
        assert hvd.allgather(x).shape == [SIZE * rows, columns]
        assert hvd.alltoall(x, splits=[0] * SIZE)[0].shape == [0, columns]
        share = rows // SIZE + (rows % SIZE > RANK)
        assert hvd.reducescatter(x).shape == [share, columns]
    # Of one rank alone.
    mine = tensor_of(RANK)[: None if RANK else 0]
    np.testing.assert_array_equal(hvd.allgather(mine), np.concatenate(everyone()[1:]))
    received, _ = hvd.alltoall(mine, splits=[0] * (SIZE - 1) + [len(mine)])
    assert len(received) == (2 * SIZE * (SIZE - 1) if RANK == SIZE - 1 else 0)
    # Gloo sized the buffer of a connection by the messages of a reducescatter: these
    # 32 MB then took 20 s.
    start = time.monotonic()
    assert tf.reduce_all(hvd.broadcast(tf.fill([8 << 20], float(RANK)), 0) == 0)
    assert time.monotonic() - start < 10


def test_gradient_of_allgather_in_an_elastic_job(monkeypatch):
    # Its functions outlive a change of ranks: they ask for the rank when they run.
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")

    @tf.function
    def step(x):
        gathered = tf.reshape(hvd.allgather(x), [SIZE * x.shape[0], *x.shape[1:]])
        return tf.gradients(tf.reduce_sum(gathered**2) * (RANK + 1), [x])[0]

    x = tf.constant(tensor_of(RANK))
    # The losses of all ranks weigh 1 + 2 + ... + SIZE.
    np.testing.assert_allclose(step(x), x * SIZE * (SIZE + 1), rtol=1e-5)
    nodes = step.get_concrete_function(x).graph.get_operations()
    assert any(node.type == "HorovodRank" for node in nodes)


def test_maximum_has_no_gradient():
    x = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        largest = hvd.allreduce(x, op=hvd.Max)
    with pytest.raises(NotImplementedError, match="stop_gradient"):
        tape.gradient(largest, x)


def test_broadcast_variables_though_a_rank_has_built_a_model_more():
    if RANK == 0:
        keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    optimizer = keras.optimizers.Adam(0.1 * (RANK + 1))
    optimizer.build(model.trainable_variables)
    optimizer.iterations.assign(RANK + 5)
    hvd.broadcast_variables(model.weights + optimizer.variables, root_rank=SIZE - 1)
    assert int(optimizer.iterations) == SIZE + 4
    assert float(optimizer.learning_rate) == pytest.approx(0.1 * SIZE)
    for weights in hvd.allgather_object(model.get_weights()):
        for theirs, mine in zip(weights, model.get_weights(), strict=True):
            np.testing.assert_array_equal(theirs, mine)


def test_broadcast_in_place_is_ordered_in_a_function():
    variable = tf.Variable([float(RANK)])

    @tf.function
    def step():
        hvd.broadcast_variables([variable], SIZE - 1, inplace=True)
        return hvd.allreduce(tf.constant(1.0), op=hvd.Sum)

    assert step() == SIZE
    assert variable[0] == SIZE - 1
    # The write of the token, which starts the next collective, depends on it.
    operations = step.get_concrete_function().graph.get_operations()
    written = next(each for each in operations if each.type == "AssignAddVariableOp")
    before, found = [written], set()
    while before:
        operation = before.pop()
        if operation not in found:
            found.add(operation)
            before += [each.op for each in operation.inputs]
            before += operation.control_inputs
    assert "HorovodBroadcastInplaceResource" in {each.type for each in found}


@pytest.mark.parametrize("inplace", [False, True])
def test_broadcast_variables_writes_into_variables(inplace):
    # Small variables of a dtype are one buffer: scalars, empty ones, one that is large.
    shapes = [(), (2, 3), (0, 2), (4,), (600, 500)]
    # Horovod writes no bfloat16 in place.
    dtypes = ["float32", "int64", "float16", "bool"] + ["bfloat16"] * (not inplace)
    variables = [keras.Variable([float(RANK)]), tf.Variable([RANK + 1.0], name="v")]
    variables += [
        tf.Variable(
            tf.cast(tf.fill(shape, number + 10 * RANK), dtype), name=f"v{number}"
        )
        for number, (shape, dtype) in enumerate(itertools.product(shapes, dtypes))
    ]
    hvd.broadcast_variables(variables, SIZE - 1, inplace=inplace)
    assert float(variables[0][0]) == SIZE - 1
    assert float(variables[1][0]) == SIZE
    for number, variable in enumerate(variables[2:]):
        sent = tf.fill(variable.shape, number + 10 * (SIZE - 1))
        assert tf.reduce_all(variable == tf.cast(sent, variable.dtype)), variable.name


@pytest.mark.ranks
def test_objects_of_different_types_on_different_ranks():
    received = hvd.broadcast_object(
        {"a": [1, 2]} if RANK == SIZE - 1 else None, SIZE - 1
    )
    assert received == {"a": [1, 2]}
    mine = [RANK] if RANK % 2 else {"rank": RANK}
    expected = [[r] if r % 2 else {"rank": r} for r in range(SIZE)]
    assert hvd.allgather_object(mine) == expected


@pytest.mark.ranks
@pytest.mark.parametrize("least", [0, 4000, 5000])
def test_objects_that_are_longer_than_the_first_exchange(least):
    # It has 4 KB of each rank, the pickle's own bytes included.
    text = "x" * (least + 100 * RANK)
    assert hvd.allgather_object(text) == ["x" * (least + 100 * r) for r in range(SIZE)]


# The last rank's object, or the item for it, is the lock.
OBJECT_OPERATIONS = {
    "allgather_object": lambda obj: hvd.allgather_object(obj),
    "broadcast_object": lambda obj: hvd.broadcast_object(obj, SIZE - 1),
    "gather_object": lambda obj: objects.gather_object(obj, name="gathered"),
}


def check_refused(operation, rank, call):
    error = rf"^{operation}: rank {rank} cannot pickle its object: .*_thread.lock"
    with pytest.raises(pickle.PicklingError, match=error):
        call()
    # The next call is matched with the next one of the others.
    expected = [f"next {rank}" for rank in range(SIZE)]
    assert hvd.allgather_object(f"next {RANK}") == expected


@pytest.mark.ranks
@pytest.mark.parametrize("operation", OBJECT_OPERATIONS)
def test_an_object_that_cannot_be_pickled_is_an_error_on_all_ranks(operation):
    obj = threading.Lock() if RANK == SIZE - 1 else RANK
    call = OBJECT_OPERATIONS[operation]
    check_refused(operation, SIZE - 1, functools.partial(call, obj))


@pytest.mark.ranks
def test_an_item_that_cannot_be_pickled_is_an_error_on_all_ranks():
    items = [*range(SIZE - 1), threading.Lock()]
    scatter = functools.partial(objects.scatter_object, items, name="scattered")
    check_refused("scatter_object", 0, scatter)


BFLOAT16_ON_THE_WIRE = [
    ("float32", hvd.Compression.none),
    ("bfloat16", hvd.Compression.none),
    ("float32", hvd.Compression.bf16),
]


@pytest.mark.parametrize(("dtype", "compression"), BFLOAT16_ON_THE_WIRE)
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("in_function", [False, True])
def test_shapes_that_differ_between_ranks_are_an_error(
    place, in_function, dtype, compression
):
    # Horovod's own grouped operation reports the last tensor's error only, and
    # returns uninitialised memory for the others.
    tensors = [tf.ones([2 + RANK if i == place else 2, 3], dtype) for i in range(3)]
    reduce = functools.partial(
        hvd.grouped_allreduce, name=f"shapes_{place}", compression=compression
    )
    reduce = tf.function(reduce) if in_function else reduce
    with pytest.raises(tf.errors.OpError, match="Mismatched"):
        reduce(tensors)
    with pytest.raises(tf.errors.OpError, match="Mismatched"):
        hvd.grouped_allgather([tf.transpose(t) for t in tensors])


@pytest.mark.ranks
@pytest.mark.parametrize(("dtype", "compression"), BFLOAT16_ON_THE_WIRE)
@pytest.mark.parametrize(
    ("mine", "others"), [((2, 3), (3, 2)), ((3,), (4,)), ((6,), (2, 3)), ((2,), (4,))]
)
def test_shapes_that_fill_the_same_space_are_an_error(mine, others, dtype, compression):
    # bfloat16 is padded to a multiple of the ranks, in a flat buffer.
    value = tf.ones(mine if RANK == 0 else others, dtype)
    with pytest.raises(tf.errors.OpError, match="Sent by rank 0: Average of"):
        hvd.allreduce(value, compression=compression)


@pytest.mark.parametrize(("dtype", "compression"), BFLOAT16_ON_THE_WIRE)
@pytest.mark.parametrize("signature", [None, [None, 3], [2, None]])
def test_shapes_that_one_rank_knows_only_when_it_runs(signature, dtype, compression):
    mine = signature if RANK == 0 else [2, 3]

    @tf.function(input_signature=[tf.TensorSpec(mine, dtype)])
    def exchange(x):
        mean = hvd.allreduce(x, compression=compression)
        (rows,) = hvd.grouped_allgather([x], name="rows")
        return mean, rows

    mean, rows = exchange(tf.fill([2, 3], tf.cast(RANK, dtype)))
    np.testing.assert_array_equal(mean, np.full((2, 3), (SIZE - 1) / 2))
    np.testing.assert_array_equal(rows, np.repeat(np.arange(SIZE), 6).reshape(-1, 3))


def test_shapes_that_nobody_knows_and_that_differ_are_an_error():
    @tf.function
    def mean(rows):
        ones = tf.numpy_function(
            lambda n: np.ones((n, 3), "float32"), [rows], tf.float32
        )
        return hvd.allreduce(ones)

    np.testing.assert_array_equal(mean(tf.constant(2)), np.ones((2, 3)))
    with pytest.raises(tf.errors.OpError, match="Mismatched"):
        mean(tf.constant(2 + RANK))


def test_shapes_that_differ_in_single_collectives_are_an_error():
    value = tf.ones([2 + RANK, 2])
    for collective in (
        hvd.allreduce,
        lambda x: hvd.allreduce(x, op=hvd.Sum),
        lambda x: hvd.allgather(tf.transpose(x)),
        lambda x: hvd.broadcast(x, 0),
        hvd.reducescatter,
    ):
        with pytest.raises(tf.errors.OpError, match="Mismatched"):
            collective(value)


def sparse(value):
    return tf.IndexedSlices(value, tf.range(2), tf.constant([2, 3]))


def by_rank(first, other):
    return first if RANK == 0 else other


ONES = tf.ones([2, 3])
# What rank 0 calls, and what the others call under the same name.
DIFFERENT_CALLS = {
    "dtype": (
        lambda: hvd.allreduce(ONES, name="x"),
        lambda: hvd.allreduce(tf.cast(ONES, tf.int32), name="x"),
    ),
    "bfloat16": (
        lambda: hvd.allreduce(ONES, name="x"),
        lambda: hvd.allreduce(tf.cast(ONES, tf.bfloat16), name="x"),
    ),
    "op": (
        lambda: hvd.allreduce(ONES, name="x"),
        lambda: hvd.allreduce(ONES, name="x", op=hvd.Sum),
    ),
    "factor": (
        lambda: hvd.allreduce(ONES, name="x", prescale_factor=0.5),
        lambda: hvd.allreduce(ONES, name="x", prescale_factor=np.float32(2.0)),
    ),
    "root": (
        lambda: hvd.broadcast(ONES, 0, name="x"),
        lambda: hvd.broadcast(ONES, 1, name="x"),
    ),
    "maximum": (
        lambda: hvd.allreduce(ONES, name="x", op=hvd.Max),
        lambda: hvd.allreduce(ONES, name="x", op=hvd.Sum),
    ),
    "kind": (
        lambda: hvd.allreduce(ONES, name="x"),
        lambda: hvd.allreduce(sparse(ONES), name="x"),
    ),
    "length": (
        lambda: hvd.grouped_allreduce([ONES], name="x"),
        lambda: hvd.grouped_allreduce([ONES, ONES], name="x"),
    ),
    "length_of_large": (
        lambda: hvd.grouped_allreduce([tf.ones([1 << 19])] * 2, name="x"),
        lambda: hvd.grouped_allreduce([tf.ones([1 << 19])], name="x"),
    ),
    "dtype_in_a_list": (
        lambda: hvd.grouped_allreduce([ONES, ONES], name="x"),
        lambda: hvd.grouped_allreduce([ONES, tf.cast(ONES, tf.int32)], name="x"),
    ),
    "length_of_gathered": (
        lambda: hvd.grouped_allgather([ONES], name="x"),
        lambda: hvd.grouped_allgather([ONES, ONES, ONES], name="x"),
    ),
    "dtype_of_gathered": (
        lambda: hvd.allgather(ONES, name="x"),
        lambda: hvd.allgather(tf.cast(ONES, tf.int32), name="x"),
    ),
    "length_of_scattered": (
        lambda: hvd.grouped_reducescatter([ONES], name="x"),
        lambda: hvd.grouped_reducescatter([ONES, ONES], name="x"),
    ),
    "collective": (
        lambda: hvd.allreduce(ONES, name="x"),
        lambda: hvd.allgather(ONES, name="x"),
    ),
    "collective_of_a_root": (
        lambda: hvd.allreduce(ONES, name="x"),
        lambda: hvd.broadcast(ONES, 0, name="x"),
    ),
    "splits": (
        lambda: hvd.alltoall(ONES, splits=[1] * SIZE, name="x"),
        lambda: hvd.alltoall(ONES, splits=[2] * SIZE, name="x"),
    ),
    "rows_without_splits": (
        lambda: hvd.alltoall(tf.ones([SIZE, 3]), name="x"),
        lambda: hvd.alltoall(tf.ones([SIZE + 1, 3]), name="x"),
    ),
    "splits_of_two_ranks": (
        lambda: hvd.alltoall(ONES, splits=[2] * SIZE, name="x"),
        lambda: hvd.alltoall(ONES, splits=[3] * SIZE, name="x"),
    ),
    "variables_in_place": (
        lambda: hvd.allreduce(ONES, name="x"),
        lambda: hvd.broadcast_variables([tf.Variable(ONES)], 0, inplace=True),
    ),
    "length_of_variables": (
        lambda: hvd.broadcast_variables([tf.Variable(ONES)], 0),
        lambda: hvd.broadcast_variables([tf.Variable(ONES)] * 2, 0),
    ),
}


@pytest.mark.parametrize("difference", DIFFERENT_CALLS)
@pytest.mark.parametrize("in_function", [False, True])
def test_calls_that_differ_between_ranks_are_an_error_at_once(difference, in_function):
    call = by_rank(*DIFFERENT_CALLS[difference])
    if in_function and "variables" in difference:
        pytest.skip("a function makes no variables")
    is_of_a_root = difference == "collective_of_a_root"
    if in_function and is_of_a_root and transport.reduction_path() == "Horovod":
        pytest.skip("blocks until the stall limit")
    step = tf.function(call) if in_function else call
    start = time.monotonic()
    with pytest.raises(tf.errors.FailedPreconditionError, match="Mismatched") as info:
        step()
    # The stall limit of these tests is a minute.
    assert time.monotonic() - start < 30
    if not in_function:
        assert "rank 0: " in str(info.value)
        assert f"rank {SIZE - 1}: " in str(info.value)


def test_the_error_names_what_each_rank_sent():
    value = by_rank(ONES, tf.cast(ONES, tf.int32))
    with pytest.raises(tf.errors.FailedPreconditionError) as info:
        hvd.allreduce(value)
    assert "rank 0: Average of float32[2, 3]; rank 1: Average of int32[2, 3]" in str(
        info.value
    )


def test_the_error_names_the_first_of_many_tensors_that_differs():
    lengths = [3] * 100
    lengths[57] = by_rank(4, 5)
    with pytest.raises(tf.errors.FailedPreconditionError) as info:
        hvd.grouped_allreduce([tf.ones([length]) for length in lengths])
    text = "rank {}: Average of 100 tensors, number 57 (from 0): float32[{}]"
    assert f"Sent by {text.format(0, 4)}; {text.format(1, 5)}" in str(info.value)
    with pytest.raises(tf.errors.FailedPreconditionError) as info:
        hvd.grouped_allreduce([ONES] * by_rank(5, 6))
    assert "of 5 tensors, number 5 (from 0): none; rank 1: " in str(info.value)
    # The number of rows may differ.
    rows = [tf.ones([1 + RANK, 2])] * 5
    with pytest.raises(tf.errors.FailedPreconditionError) as info:
        hvd.grouped_allgather([*rows, tf.ones([1, 2 + RANK])])
    assert "6 tensors, number 5 (from 0): float32[1, 2]; rank 1: " in str(info.value)


def test_the_error_names_the_collectives_and_the_splits():
    with pytest.raises(tf.errors.FailedPreconditionError) as info:
        by_rank(hvd.allgather, hvd.reducescatter)(ONES)
    assert "rank 0: allgather of float32[2, 3]; rank 1: reducescatter" in str(
        info.value
    )
    with pytest.raises(tf.errors.FailedPreconditionError) as info:
        hvd.alltoall(ONES, splits=by_rank([1] * SIZE, [2] * SIZE))
    assert "rank 0: alltoall of float32[2, 3]; rank 1: alltoall with splits=[2, 2" in (
        str(info.value)
    )


DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
)


@pytest.mark.parametrize(
    "collective",
    [
        lambda value: hvd.allreduce(value, op=hvd.Sum),
        lambda value: hvd.reducescatter(value, op=hvd.Sum),
        hvd.allgather,
    ],
    ids=["allreduce", "reducescatter", "allgather"],
)
def test_an_error_lists_all_dtypes_that_are_supported(collective):
    with pytest.raises(TypeError, match="string cannot be") as info:
        collective(tf.constant(["a"]))
    listed = str(info.value).partition("one of ")[2].rstrip(".").split(", ")
    accepted = []
    for dtype in DTYPES:
        with contextlib.suppress(TypeError):
            assert collective(tf.ones([SIZE], dtype)).dtype == dtype
            accepted.append(dtype)
    assert sorted(listed) == sorted(accepted)


@pytest.mark.parametrize("dtype", ["string", "bool", "uint16", "complex64"])
def test_dtypes_that_cannot_be_reduced_are_an_error(dtype):
    value = tf.constant(["a"]) if dtype == "string" else tf.cast([1], dtype)
    with pytest.raises(TypeError, match=f"{dtype} cannot be reduced"):
        hvd.allreduce(value, op=hvd.Sum)
    with pytest.raises(TypeError, match=f"{dtype} cannot be reduced and scattered"):
        hvd.reducescatter(value)


@pytest.mark.parametrize(
    ("prescale", "postscale"), [(2.0**15, 1.0), (2.0**16, 1.0), (1.0, 2.0**16), (0, 1)]
)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_factors_that_are_large_for_the_dtype(dtype, prescale, postscale):
    mean = hvd.allreduce(
        tf.constant([2.0**-20], dtype),
        prescale_factor=prescale,
        postscale_factor=postscale,
    )
    np.testing.assert_array_equal(mean, [2.0**-20 * prescale * postscale])


def test_sparse_tensors_of_lists():
    rows = tf.IndexedSlices([[1.0 + RANK, 2.0]], [RANK], [SIZE, 2])
    (total,) = hvd.grouped_allreduce([rows], op=hvd.Sum)
    expected = [[1.0 + rank, 2.0] for rank in range(SIZE)]
    np.testing.assert_array_equal(tf.convert_to_tensor(total), expected)
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        with pytest.raises(NotImplementedError, match=r"Received: op=hvd\.\w+\. Pass"):
            hvd.grouped_allreduce([ONES, rows], op=op)


@pytest.mark.parametrize("collective", [hvd.allgather, hvd.alltoall])
@pytest.mark.parametrize("wrap", [lambda step: step, tf.function])
def test_scalars_have_no_rows(collective, wrap):
    with pytest.raises(ValueError, match=r"tf\.reshape\(value, \[1\]\)"):
        wrap(collective)(tf.constant(1.0))


def test_splits_below_zero():
    with pytest.raises(ValueError, match="splits must be 0 or more"):
        hvd.alltoall(tf.zeros([3]), splits=[-1, 4])


@pytest.mark.parametrize(
    "collective",
    [
        lambda root: hvd.broadcast(1.0, root),
        lambda root: hvd.broadcast_object(1.0, root),
        lambda root: hvd.broadcast_variables([tf.Variable(1.0)], root),
    ],
)
def test_a_root_rank_out_of_range(collective):
    with pytest.raises(ValueError, match=f"Received: {SIZE}, expected one of"):
        collective(SIZE)


def test_empty_lists():
    assert hvd.grouped_allreduce([]) == hvd.grouped_allgather([]) == []
    assert hvd.grouped_reducescatter([]) == []
    hvd.broadcast_variables([], 0)


def test_strings_cannot_be_moved():
    for move in (hvd.allgather, hvd.alltoall, lambda x: hvd.broadcast(x, 0)):
        with pytest.raises(TypeError, match="string cannot be moved"):
            move(tf.constant(["a"]))


any_collective = pytest.mark.parametrize(
    "collective",
    [
        hvd.allreduce,
        hvd.allgather,
        hvd.alltoall,
        hvd.reducescatter,
        lambda x: hvd.broadcast(x, 0),
    ],
)


@any_collective
def test_xla_is_an_error_at_trace_time(collective):
    compiled = tf.function(collective, jit_compile=True)
    with pytest.raises(ValueError, match="jit_compile=False"):
        compiled(tf.ones([2 * SIZE]))


@any_collective
def test_a_vectorized_map_is_an_error_at_trace_time(collective):
    rows = tf.ones([3, 2 * SIZE])
    with pytest.raises(ValueError, match=r"use tf\.map_fn"):
        tf.vectorized_map(tf.function(collective), rows)
    # The remedy of the message.
    assert len(tf.map_fn(collective, rows)) == 3


@pytest.mark.ranks
@pytest.mark.parametrize("wrap", [lambda join: join, tf.function])
def test_mean_over_the_ranks_that_have_not_joined(wrap):
    join = wrap(hvd.join)

    # Rank r takes part in r + 1 reductions, then joins.
    @tf.function
    def mean(value):
        return hvd.allreduce(value, name="uneven")

    mine = tf.constant(10.0 * (RANK + 1))
    # Twice: Horovod's own join does nothing the second time.
    for _ in range(2):
        for step in range(RANK + 1):
            present = range(step, SIZE)
            expected = sum(10.0 * (rank + 1) for rank in present) / len(present)
            assert float(mean(mine)) == pytest.approx(expected)
        assert int(join()) == SIZE - 1
    assert float(mean(mine)) == pytest.approx(10 * (SIZE + 1) / 2)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("collective", "expected"),
    [
        (hvd.allreduce, lambda xs: sum(xs) / SIZE),
        (lambda x: hvd.allreduce(x, op=hvd.Max), max),
        (lambda x: hvd.allreduce(tf.cast(x, tf.bfloat16)), lambda xs: sum(xs) / SIZE),
        (hvd.allgather, lambda xs: [x for x in xs for _ in range(2 * SIZE)]),
        (lambda x: hvd.broadcast(x, SIZE - 1), lambda xs: xs[-1]),
        (hvd.alltoall, lambda xs: [x for x in xs for _ in range(2)]),
        (lambda x: hvd.reducescatter(x, op=hvd.Sum), sum),
    ],
)
def test_what_is_constant_on_one_rank_is_asked_anew_each_time(collective, expected):
    @tf.function
    def step(value):
        return collective(tf.ones([2 * SIZE]) if RANK == 0 else value)

    for number in range(1, 4):
        values = [1.0] + [number + rank / 4.0 for rank in range(1, SIZE)]
        received = step(tf.fill([2 * SIZE], values[RANK]))
        wanted = np.broadcast_to(np.array(expected(values), "float32"), received.shape)
        np.testing.assert_allclose(tf.cast(received, tf.float32), wanted, rtol=1e-2)


def test_join_waits_for_the_collectives_before_it_in_a_function():
    # Rank 0 is slow to have its value; its join must not overtake its mean.
    @tf.function
    def step(rounds):
        value = tf.ones([300, 300])
        for _ in tf.range(rounds):
            value = tf.tanh(value @ value)
        mean = hvd.allreduce(tf.reduce_mean(value) * 0 + 1.0 + RANK, name="slow")
        return mean, hvd.join()

    for _ in range(3):
        mean, last = step(300 if RANK == 0 else 1)
        assert float(mean) == pytest.approx((SIZE + 1) / 2)
        assert 0 <= int(last) < SIZE


def test_names_of_tensorflow_1_say_what_to_use_instead():
    with pytest.raises(RuntimeError, match="BroadcastGlobalVariablesCallback"):
        hvd.broadcast_global_variables(0)
    with pytest.raises(RuntimeError, match="broadcast_object"):
        hvd.broadcast_object_fn()
    with pytest.raises(ValueError, match="TensorFlow 1"):
        hvd.broadcast_object(1, session="session")
