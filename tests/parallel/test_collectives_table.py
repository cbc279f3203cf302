"""All collectives, dtypes, options and shapes, against NumPy.

The cases of a table share one function, or one list of eager calls, since each launch
and each trace takes long. The oracle of gradients is one process that computes every
rank's loss from every rank's input, adds the losses up, and differentiates the sum.
"""

import dataclasses
import functools
import importlib
import itertools
import math
import re

import numpy as np
import pytest
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain.collectives.transport import native_reduction

pytestmark = pytest.mark.ranks
RANK, SIZE = hvd.rank(), hvd.size()
# The package has a function of this name.
allreduce = importlib.import_module("hvdtrain.collectives.transport.allreduce")
BFLOAT16 = tf.bfloat16.as_numpy_dtype
SCATTERED = ["int32", "int64", "float16", BFLOAT16, "float32", "float64"]
REDUCED = ["uint8", "int8", *SCATTERED]
MOVED = [*REDUCED, "bool", "uint16", "int16", "uint32", "uint64", "complex64"]
EPSILON = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-23, "float64": 2**-52}
SHAPES = [(2, 3), (), (0,), (4, 0, 2), (1,)]
OPS = {
    hvd.Sum: np.sum,
    hvd.Average: np.mean,
    hvd.Min: np.min,
    hvd.Max: np.max,
    hvd.Product: np.prod,
}
# Before and after the reduction. 10 * 0.7 is 7 in float64, and less with the float32 of
# Horovod's attributes.
FACTORS = [
    (1.0, 1.0),
    (2, 0.7),
    (0.5, np.float32(0.5)),
    (np.float64(1.5), np.int64(1)),
    (tf.constant(0.25), 1),
]


@dataclasses.dataclass(frozen=True)
class Way:
    """How collectives are called, and over which ranks."""

    how: str
    path: str
    process_set: hvd.ProcessSet
    members: list[int]

    @property
    def takes_all(self):
        return (self.how, self.path) == WAYS[0]

    def run(self, cases):
        """Return the results of all calls."""

        def call_all():
            return [call() for call, _ in cases]

        if self.how == "graph":
            return tf.function(call_all, autograph=False)()
        return call_all()

    def check(self, cases, some):
        """Compare the results of all or some calls with what is expected of each."""
        cases = cases if self.takes_all else some
        results = self.run(cases)
        for result, (_, expected) in zip(results, cases, strict=True):
            flat = [tf.nest.flatten(each, expand_composites=True) for each in result]
            for got, wanted in zip(itertools.chain(*flat), expected, strict=True):
                assert_equal(np.asarray(got.numpy()), wanted)


# The first way takes all cases of a table, the others some of them.
WAYS = [
    ("eager", "auto"),
    ("eager", "horovod"),
    ("eager", "set"),
    ("graph", "auto"),
    ("graph", "set"),
]


@pytest.fixture(params=WAYS, ids="-".join)
def way(request, monkeypatch):
    how, path = request.param
    everyone = hvd.global_process_set
    if path != "set":
        if path == "horovod":
            monkeypatch.setattr(native_reduction, "takes_part", lambda _: False)
            # As large tensors, without a flat buffer.
            monkeypatch.setattr(allreduce, "_FLAT_BYTES", 0)
        yield Way(how, path, everyone, list(range(SIZE)))
        return
    if SIZE == 1:
        pytest.skip("two sets need two ranks")
    middle = (SIZE + 1) // 2
    ranks = [list(range(middle)), list(range(middle, SIZE))]
    sets = [hvd.add_process_set(members) for members in ranks]
    number = int(middle <= RANK)
    yield Way(how, path, sets[number], ranks[number])
    for process_set in sets:
        hvd.remove_process_set(process_set)


def is_integer(dtype):
    return np.issubdtype(dtype, np.integer)


def assert_equal(result, expected):
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
    tolerance = 4 * EPSILON.get(result.dtype.name, 0)
    if tolerance:
        result, expected = result.astype("float64"), expected.astype("float64")
        np.testing.assert_allclose(result, expected, rtol=tolerance)
    else:
        np.testing.assert_array_equal(result, expected)


def values(rank, shape, dtype):
    """Return small numbers that differ by rank and by place, of both signs."""
    places = np.arange(math.prod(shape)).reshape(shape)
    numbers = (2 * places + 3 * rank) % 5 + 1
    if np.dtype(dtype).kind in "ui":
        return numbers.astype(dtype)
    if np.dtype(dtype).kind == "b":
        return numbers > 2
    return (numbers * (1 - places % 2 * 2)).astype(dtype)


def scaled(array, factor, divisor=1):
    """Scale in the precision that the documentation of `allreduce` names."""
    is_double = is_integer(array.dtype) or array.dtype == np.float64
    wide = array.astype("float64" if is_double else "float32")
    return (wide * wide.dtype.type(factor) / divisor).astype(array.dtype)


def reduced(op, arrays, prescale=1, postscale=1):
    dtype = arrays[0].dtype
    sent = np.stack([scaled(array, prescale) for array in arrays])
    if op == hvd.Average and is_integer(dtype):
        total = sent.sum(axis=0).astype(dtype)
        return scaled(total, postscale, divisor=len(arrays))
    sent = sent if is_integer(dtype) else sent.astype("float64")
    return scaled(OPS[op](sent, axis=0).astype(dtype), postscale)


def options_of(way, prescale, postscale, op):
    return {
        "op": op,
        "prescale_factor": prescale,
        "postscale_factor": postscale,
        "process_set": way.process_set,
    }


def over(way, shape, dtype):
    """Return this rank's values, and those of all ranks that take part."""
    return values(RANK, shape, dtype), [values(r, shape, dtype) for r in way.members]


def test_allreduce(way):
    cases = []
    kinds = list(itertools.product(REDUCED, SHAPES))
    for factors, op in itertools.product(FACTORS, OPS):
        mine, inputs = zip(*(over(way, s, d) for d, s in kinds), strict=True)
        options = options_of(way, *factors, op)
        call = functools.partial(hvd.grouped_allreduce, mine, **options)
        cases.append((call, [reduced(op, arrays, *factors) for arrays in inputs]))
    # Each dtype and op, with one shape and one pair of factors.
    others = zip(itertools.cycle(FACTORS), itertools.cycle(SHAPES[:3]), strict=False)
    for (dtype, op), (factors, shape) in zip(
        itertools.product(REDUCED, OPS), others, strict=False
    ):
        mine, arrays = over(way, shape, dtype)
        options = options_of(way, *factors, op)
        call = functools.partial(hvd.allreduce, mine, **options)
        cases.append((lambda call=call: [call()], [reduced(op, arrays, *factors)]))
    way.check(cases, [*cases[6:20:8], *cases[25::9]])


def sparse(rank, dtype):
    """Return one row for rank 0, two for rank 1, and so on, and their indices."""
    return values(rank, (rank + 1, 2), dtype), np.arange(rank + 1) * 2


def test_sparse_allreduce(way):
    cases = []
    for factors, op in itertools.product(FACTORS, [hvd.Sum, hvd.Average]):
        mine = [
            tf.IndexedSlices(*sparse(RANK, dtype), tf.constant([2 * SIZE, 2]))
            for dtype in REDUCED
        ]
        expected = []
        for dtype in REDUCED:
            rows, indices = zip(*(sparse(r, dtype) for r in way.members), strict=True)
            sent = np.concatenate([scaled(each, factors[0]) for each in rows])
            divisor = len(rows) if op == hvd.Average else 1
            result = scaled(sent, factors[1], divisor)
            shape = np.array([2 * SIZE, 2], "int32")
            expected += [result, np.concatenate(indices), shape]
        options = options_of(way, *factors, op)
        cases.append(
            (functools.partial(hvd.grouped_allreduce, mine, **options), expected)
        )
    way.check(cases, cases[3:4])


def test_reducescatter(way):
    ranks, place = len(way.members), way.members.index(RANK)
    shapes = [(2 * ranks + 1, 2), (ranks,), (0, 3), (ranks, 0)]
    cases = []
    for factors, op in itertools.product(FACTORS, [hvd.Sum, hvd.Average]):
        options = options_of(way, *factors, op)
        mine, expected = [], []
        for dtype, shape in itertools.product(SCATTERED, shapes):
            sent, arrays = over(way, shape, dtype)
            total = reduced(op, arrays, *factors)
            mine.append(sent)
            expected.append(np.array_split(total, ranks)[place])
        call = functools.partial(hvd.grouped_reducescatter, mine[1::2], **options)
        cases.append((call, expected[1::2]))
        call = functools.partial(hvd.reducescatter, **options)
        cases.append((lambda c=call, m=mine[::2]: [c(x) for x in m], expected[::2]))
    way.check(cases, cases[5:20:9])


def test_allgather(way):
    cases = []
    shapes = [lambda r: (r, 2), lambda r: (r + 1,), lambda r: (3, 0), lambda r: (0, 4)]
    for shape in shapes:
        mine = [values(RANK, shape(RANK), dtype) for dtype in MOVED]
        expected = [
            np.concatenate([values(r, shape(r), dtype) for r in way.members])
            for dtype in MOVED
        ]
        gather = functools.partial(hvd.grouped_allgather, process_set=way.process_set)
        cases.append((functools.partial(gather, mine), expected))
        gather = functools.partial(hvd.allgather, process_set=way.process_set)
        cases.append((lambda m=mine, g=gather: [*map(g, m)], expected))
    way.check(cases, cases[2:4])


def test_broadcast(way):
    cases = []
    for dtype, shape in itertools.product(MOVED, SHAPES):
        root = way.members[len(cases) % len(way.members)]
        mine = values(RANK, shape, dtype)
        call = functools.partial(hvd.broadcast, mine, root, process_set=way.process_set)
        cases.append((lambda call=call: [call()], [values(root, shape, dtype)]))
    way.check(cases, cases[::7])


def test_alltoall(way):
    ranks, place = len(way.members), way.members.index(RANK)
    # The number of rows that the n-th rank sends to each.
    counts = [[(n + to) % 3 for to in range(ranks)] for n in range(ranks)]
    send = functools.partial(hvd.alltoall, process_set=way.process_set)
    cases = []
    for dtype, columns in itertools.product(MOVED, [(), (2,), (0,)]):
        mine, arrays = over(way, (2 * ranks, *columns), dtype)
        expected = np.concatenate([a[2 * place : 2 * place + 2] for a in arrays])
        cases.append((lambda mine=mine: [send(mine)], [expected]))
        arrays = [
            values(rank, (sum(splits), *columns), dtype)
            for rank, splits in zip(way.members, counts, strict=True)
        ]
        blocks = [
            np.split(array, np.cumsum(splits)[:-1])[place]
            for array, splits in zip(arrays, counts, strict=True)
        ]
        received = np.array([splits[place] for splits in counts], "int32")
        call = functools.partial(send, arrays[place], splits=counts[place])
        cases.append((call, [np.concatenate(blocks), received]))
    way.check(cases, cases[::9])


def loss_of(rank, result):
    """A loss that differs between ranks and elements."""
    weights = tf.reshape(tf.range(tf.size(result)), tf.shape(result))
    weights = tf.cast(weights, result.dtype) + 1
    return tf.reduce_sum(tf.sin(result * tf.cast(rank + 1, result.dtype)) * weights)


def equal_rows(way):
    return [(2 * len(way.members), 3)] * len(way.members)


def unequal_rows(way):
    return [(rank + 1, 3) for rank in way.members]


# The collective of x over a set; for all inputs, the results of all ranks; the shapes.
GRADIENTS = {
    "allreduce": (
        lambda x, way, factors, op: hvd.allreduce(x, **options_of(way, *factors, op)),
        lambda xs, mean: [mean(tf.add_n(xs))] * len(xs),
        equal_rows,
    ),
    "grouped_allreduce": (
        lambda x, way, factors, op: tf.concat(
            hvd.grouped_allreduce([x, x[:1] ** 2], **options_of(way, *factors, op)), 0
        ),
        lambda xs, mean: (
            [
                tf.concat(
                    [mean(tf.add_n(xs)), mean(tf.add_n([x[:1] ** 2 for x in xs]))], 0
                )
            ]
            * len(xs)
        ),
        equal_rows,
    ),
    "reducescatter": (
        lambda x, way, factors, op: hvd.reducescatter(
            x, **options_of(way, *factors, op)
        ),
        lambda xs, mean: tf.split(mean(tf.add_n(xs)), len(xs)),
        equal_rows,
    ),
    "allgather": (
        lambda x, way, *_: hvd.allgather(x, process_set=way.process_set),
        lambda xs, _: [tf.concat(xs, 0)] * len(xs),
        unequal_rows,
    ),
    "grouped_allgather": (
        lambda x, way, *_: tf.concat(
            hvd.grouped_allgather([x, 2 * x], process_set=way.process_set), 0
        ),
        lambda xs, _: [tf.concat([*xs, *(2 * x for x in xs)], 0)] * len(xs),
        unequal_rows,
    ),
    "broadcast": (
        lambda x, way, *_: hvd.broadcast(
            x, way.members[-1], process_set=way.process_set
        ),
        lambda xs, _: [xs[-1] + 0 * x for x in xs],
        equal_rows,
    ),
    "alltoall": (
        lambda x, way, *_: hvd.alltoall(x, process_set=way.process_set),
        lambda xs, _: [
            tf.concat(parts, 0)
            for parts in zip(*(tf.split(x, len(xs)) for x in xs), strict=True)
        ],
        equal_rows,
    ),
    # The rank in place n sends n + 1 rows to the first rank and keeps no other.
    "alltoall_with_splits": (
        lambda x, way, *_: hvd.alltoall(
            x,
            splits=[len(x)] + [0] * (len(way.members) - 1),
            process_set=way.process_set,
        )[0],
        lambda xs, _: [tf.concat(xs, 0)] + [xs[0][:0]] * (len(xs) - 1),
        unequal_rows,
    ),
}


def test_gradients(way):
    place = way.members.index(RANK)
    collectives = list(GRADIENTS.values())
    options = [hvd.Sum, hvd.Average], FACTORS[: 3 if way.takes_all else 2]
    cases = []
    reductions = list(itertools.product(collectives[:3], *options))
    for (compute, compute_all, shapes), op, factors in [
        *reductions[:: 1 if way.takes_all else 3],
        *itertools.product(collectives[3:], [hvd.Sum], FACTORS[:1]),
    ]:
        rng = np.random.default_rng(1)
        inputs = [tf.constant(rng.normal(size=s)) for s in shapes(way)]
        divisor = len(inputs) if op == hvd.Average else 1
        factor = float(factors[0]) * float(factors[1]) / divisor
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            results = compute_all(inputs, lambda total, f=factor: total * f)
            losses = map(loss_of, way.members, results)
            total = tf.add_n(list(losses))
        expected = tape.gradient(total, inputs[place]).numpy()

        def gradient(x=inputs[place], compute=compute, rest=(factors, op)):
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = loss_of(RANK, compute(x, way, *rest))
            return [tape.gradient(loss, x)]

        cases.append((gradient, expected))
    for (result,), (_, expected) in zip(way.run(cases), cases, strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-12, atol=1e-12)


def test_factors_that_are_no_numbers_are_an_error():
    for function in (hvd.allreduce, hvd.reducescatter):
        with pytest.raises(TypeError, match="prescale_factor must be a number"):
            function([1.0] * SIZE, prescale_factor="half")

    @tf.function(autograph=False)
    def scale(factor):
        return hvd.allreduce(1.0, postscale_factor=factor)

    with pytest.raises(TypeError, match=r"must be a number.*Multiply"):
        scale(tf.constant(2.0))
    with pytest.raises(ValueError, match=r"one of hvd\.Average.*Received: op='sum'"):
        hvd.allreduce(1.0, op="sum")
    for dtype in ("string", "bool"):
        with pytest.raises(TypeError, match=f"{dtype} cannot be reduced"):
            hvd.allreduce(tf.zeros([1], dtype), op=hvd.Sum, prescale_factor=2.0)


def test_adasum_is_an_error_where_it_would_block_or_end_the_process():
    sets = [hvd.add_process_set([rank]) for rank in range(SIZE) if SIZE > 1]
    everyone = hvd.global_process_set
    refused = [(each, f"a process set of ranks {each.ranks}") for each in sets]
    if not hvd.mpi_enabled():
        refused.append((everyone, "a job that was started with Gloo"))
    elif SIZE & (SIZE - 1):
        refused.append((everyone, f"{SIZE} ranks"))
    else:
        with pytest.raises(TypeError, match="int32 cannot be reduced with"):
            hvd.allreduce([1], op=hvd.Adasum)
    for process_set, received in refused:
        options = {"op": hvd.Adasum, "process_set": process_set}
        for call in (
            lambda: hvd.allreduce([1.0], **options),  # noqa: B023 - called at once
            lambda: hvd.grouped_allreduce([[1.0]], **options),  # noqa: B023
            lambda: hvd.DistributedGradientTape(tf.GradientTape(), **options),  # noqa: B023
        ):
            with pytest.raises(
                ValueError, match=f"Received: {re.escape(received)}.*Use"
            ):
                call()
    for process_set in sets:
        hvd.remove_process_set(process_set)
