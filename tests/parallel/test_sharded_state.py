"""Optimizers with sharded state, compared with replicated state."""

import keras
import numpy as np
import oracle
import pytest
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain import parallel
from hvdtrain.checkpoint.header import ArrayGroups
from hvdtrain.checkpoint.snapshot import capture
from hvdtrain.checkpoint.state_variables import StateVariables
from hvdtrain.collectives import transport
from hvdtrain.job import World
from hvdtrain.keras.replication import get_hook
from hvdtrain.sharding.full_values import FullValues, FullVariable
from hvdtrain.sharding.shards import get_sharding

RANK, SIZE = hvd.rank(), hvd.size()
optimizers = keras.optimizers
# Enough elements for several shards, for one, and no axis.
SHAPES = {"table": (13, 17), "bias": (17,), "scale": ()}
STEPS = 4


def without_decay_of_bias(optimizer):
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


ELEMENTWISE = {
    "sgd, weight decay": lambda: optimizers.SGD(0.1, weight_decay=0.1),
    "momentum, clipnorm": lambda: optimizers.SGD(0.1, momentum=0.9, clipnorm=0.3),
    "nesterov, clipvalue": lambda: optimizers.SGD(
        0.1, momentum=0.9, nesterov=True, clipvalue=0.05
    ),
    "adam, accumulation": lambda: optimizers.Adam(
        0.01, amsgrad=True, gradient_accumulation_steps=2, global_clipnorm=0.3
    ),
    "adamw": lambda: without_decay_of_bias(optimizers.AdamW(0.01, weight_decay=0.1)),
    "nadam, moving average": lambda: optimizers.Nadam(
        0.01, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3
    ),
    "adamax": lambda: optimizers.Adamax(0.01),
    "rmsprop": lambda: optimizers.RMSprop(0.01, centered=True, momentum=0.9),
    "adagrad, moving average": lambda: optimizers.Adagrad(0.1, use_ema=True),
    "adadelta": lambda: optimizers.Adadelta(1.0),
    "ftrl": lambda: optimizers.Ftrl(0.1),
    "lion": lambda: optimizers.Lion(0.01),
    "loss scale": lambda: optimizers.LossScaleOptimizer(
        optimizers.Adam(0.01, global_clipnorm=0.3)
    ),
    # Of newer versions of Keras: its slots start with the values of the weights.
    **(
        {"schedule free": lambda: optimizers.ScheduleFreeAdamW(0.01)}
        if hasattr(optimizers, "ScheduleFreeAdamW")
        else {}
    ),
}
OTHERS = {
    "adafactor": lambda: optimizers.Adafactor(0.1),
    "lamb": lambda: optimizers.Lamb(0.01),
    "muon": lambda: optimizers.Muon(0.01, weight_decay=0.1),
}
ALL = ELEMENTWISE | OTHERS
# With and without what a step changes beside the slots.
SOME = ["adafactor", "adam, accumulation", "nadam, moving average"]


def draw(shapes, *seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return [(scale * rng.normal(size=shape)).astype("float32") for shape in shapes]


def new_variables():
    values = draw(SHAPES.values(), 0)
    named = zip(values, SHAPES, strict=True)
    return [keras.Variable(value, name=name) for value, name in named]


def train(make, *, spoil=None, **options):
    """Applies gradients that differ by rank; returns weights and optimizer.

    `spoil(gradients, step)` changes them.
    """
    variables = new_variables()
    optimizer = hvd.DistributedOptimizer(make(), **options)
    count = get_hook(optimizer).skip_nonfinite() if spoil else None
    for step in range(STEPS):
        gradients = draw(SHAPES.values(), step, RANK, scale=0.1)
        if spoil:
            spoil(gradients, step)
        # As a layer that is frozen after the first step.
        used = slice(0 if step == 0 else 1, None)
        optimizer.apply(list(map(tf.constant, gradients[used])), variables[used])
    optimizer.finalize_variable_values(variables)
    assert count is None or int(count) == 1
    return [variable.numpy() for variable in variables], optimizer


def assert_equal(arrays, others, what, **tolerance):
    for number, (a, b) in enumerate(zip(arrays, others, strict=True)):
        if tolerance:
            np.testing.assert_allclose(a, b, err_msg=f"{what} {number}", **tolerance)
        else:
            np.testing.assert_array_equal(a, b, err_msg=f"{what} {number}")


def slots_of(optimizer):
    """Return full variables of an optimizer on rank 0, but for accumulators."""
    held = slots_held(optimizer)
    values = FullValues(map(FullVariable.of, held))
    return [values.gather(number) for number in range(len(held))]


def slots_held(optimizer):
    return [v for v in optimizer.variables if "accumulator" not in v.name]


@pytest.mark.parametrize("is_by_name", [True, False])
def test_the_same_weights_are_excluded_from_weight_decay(is_by_name):
    def decay(shard_state):
        model = oracle.build_model()
        last, variables = model.layers[-1], model.trainable_variables
        excluded = {"var_names": [last.name]}
        if not is_by_name:
            excluded = {"var_list": [last.kernel]}
        optimizer = optimizers.SGD(0.1, weight_decay=0.1)
        optimizer.exclude_from_weight_decay(**excluded)
        hvd.DistributedOptimizer(optimizer, shard_state=shard_state)
        optimizer.apply([tf.zeros(v.shape) for v in variables], variables)
        return model.get_weights()

    undecayed = oracle.build_model().get_weights()
    expected = decay(False)
    assert np.any(expected[0] != undecayed[0])
    if not is_by_name:
        assert_equal(expected[2:3], undecayed[2:3], "excluded weight")
    assert_equal(decay(True), expected, "decayed weight")


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(SOME, marks=[pytest.mark.ranks, pytest.mark.four_ranks]),
        pytest.param(list(ALL), marks=pytest.mark.long),
    ],
    ids=["some", "all"],
)
def test_sharded_state_is_updated_bitwise_like_replicated_state(cases):
    for name in cases:
        weights, replicated = train(ALL[name])
        found, optimizer = train(ALL[name], shard_state=True)
        assert_equal(found, weights, name)
        if name in SOME:
            slots, others = slots_of(optimizer), slots_of(replicated)
            if RANK == 0:
                assert_equal(slots, others, name)


CLIPPED = {
    name: lambda option=option: optimizers.Adam(0.01, use_ema=True, **option)
    for name, option in {
        "clipnorm": {"clipnorm": 0.3},
        "clipvalue": {"clipvalue": 0.05},
        "global_clipnorm": {"global_clipnorm": 0.3},
    }.items()
}


def spoil(gradients, step):
    if step == 1 and RANK == SIZE - 1:
        gradients[1][0] = np.nan


@pytest.mark.parametrize(
    "clipping",
    ["clipnorm", "clipvalue", pytest.param("global_clipnorm", marks=pytest.mark.ranks)],
)
def test_clipped_gradients_of_sharded_state(clipping):
    weights, _ = train(CLIPPED[clipping], spoil=spoil)
    found, _ = train(CLIPPED[clipping], spoil=spoil, shard_state=True)
    assert_equal(found, weights, clipping)


def fitted(shard_state):
    """A model trained under `fit` in mixed precision, a layer of it frozen midway."""
    keras.config.set_dtype_policy("mixed_float16")
    model = oracle.build_model()
    # The first step overflows.
    inner = optimizers.Adam(0.01, global_clipnorm=0.3, gradient_accumulation_steps=2)
    optimizer = hvd.DistributedOptimizer(
        optimizers.LossScaleOptimizer(inner, initial_scale=2.0**16),
        shard_state=shard_state,
    )
    inputs, labels = oracle.samples(5)
    for is_trainable in (True, False):
        model.layers[0].trainable = is_trainable
        model.compile(optimizer, oracle.LOSS)
        callbacks = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.ConsistencyCheckCallback(),
        ]
        oracle.fit_shard(model, inputs, labels, callbacks=callbacks)
    # Keras loads no state for fewer variables than were trained.
    model.layers[0].trainable = True
    return model


@pytest.mark.long
def test_fit_saves_the_full_state(tmp_path):
    expected = fitted(False)
    model = fitted(True)
    assert float(model.optimizer.dynamic_scale) == 2.0**15
    assert_equal(model.get_weights(), expected.get_weights(), "fit")
    path = hvd.broadcast_object(str(tmp_path / "model.keras"), name="path")
    model.save(path)
    hvd.allgather_object(None, name="saved")
    # On as many ranks, and on another number: one.
    loaded = hvd.load_model(path, shard_state=True)
    plain = keras.models.load_model(path)
    expected = [v.numpy() for v in slots_held(expected.optimizer)]
    found = [v.numpy() for v in slots_held(plain.optimizer)]
    assert_equal(found, expected, "plain")
    assert get_sharding(loaded.optimizer.variables[-1])
    slots = slots_of(loaded.optimizer)
    if RANK == 0:
        assert_equal(slots, found, "loaded")
    # The same by a checkpoint of hvdtrain.training.
    captured = capture(model, World(rank=RANK, size=SIZE), everywhere=False)
    for slot in filter(get_sharding, loaded.optimizer.variables):
        slot.assign(keras.ops.zeros_like(slot))
    full_values = ArrayGroups(captured.arrays if captured else {}).values_stored_once()
    StateVariables.of(loaded).scatter(full_values)
    slots = slots_of(loaded.optimizer)
    if RANK == 0:
        assert_equal(slots, found, "checkpoint")


def words(rows, columns, units):
    """A classifier of three ids each: the gradient of the first weight is sparse."""
    layers = [
        keras.layers.Embedding(rows, columns),
        keras.layers.Flatten(),
        keras.layers.Dense(units, "softmax"),
    ]
    return keras.Sequential([keras.Input((3,), dtype="int32"), *layers])


def one_layer(use_bias):
    layer = keras.layers.Dense(3, "softmax", use_bias=use_bias)
    return keras.Sequential([keras.Input((3,)), layer])


@pytest.mark.ranks
@pytest.mark.four_ranks
@pytest.mark.parametrize(
    ("make", "make_optimizer"),
    [
        pytest.param(
            *(lambda: words(40, 8, 3), lambda: optimizers.SGD(0.1)),
            marks=pytest.mark.long,
        ),
        (lambda: one_layer(SIZE > 2), lambda: optimizers.Adam(0.1)),
    ],
)
def test_fit_where_a_rank_has_no_part_of_a_bucket(make, make_optimizer):
    inputs = np.random.default_rng(0).integers(0, 5, (8 * SIZE, 3))
    labels = inputs.sum(axis=1) % 3

    def fitted(shard_state):
        keras.utils.set_random_seed(1)
        model = make()
        optimizer = hvd.DistributedOptimizer(make_optimizer(), shard_state=shard_state)
        model.compile(optimizer, oracle.LOSS)
        oracle.fit_shard(model, inputs, labels)
        return model.get_weights()

    assert_equal(fitted(True), fitted(False), "fit")


@pytest.mark.four_ranks
def test_sharded_averages_are_not_swapped():
    model = oracle.build_model()
    optimizer = keras.optimizers.SGD(use_ema=True)
    model.compile(hvd.DistributedOptimizer(optimizer, shard_state=True), oracle.LOSS)
    with pytest.raises(ValueError, match=r"SwapEMAWeights .* shard_state"):
        model.fit(*oracle.samples(1), callbacks=[keras.callbacks.SwapEMAWeights()])


def test_parts_are_scattered_and_gathered():
    # In a function: in shared memory, where that is possible.
    sizes = [[0, 5, 2, 0][:SIZE], [3, 1, 0, 4][:SIZE]]
    shapes = [(sum(sizes[0]),), (1, sum(sizes[1]))]
    tensors = [np.arange(np.prod(s), dtype="float32").reshape(s) for s in shapes]

    @tf.function(autograph=False)
    def exchange(rank):
        reduction = transport.Reduction(op=hvd.Sum)
        sent = [tensor + rank for tensor in tensors]
        parts = transport.reduce_to_shards(sent, sizes, reduction, name="scatter")
        # Rank 0 does not need the first.
        needed = [None if RANK == 0 else shapes[0], shapes[1]]
        return transport.gather_shards(parts, sizes, needed, name="gather")

    first, second = exchange(tf.constant(RANK, tf.float32))
    assert (first is None) == (RANK == 0)
    if first is not None:
        np.testing.assert_array_equal(first, SIZE * tensors[0] + sum(range(SIZE)))
    np.testing.assert_array_equal(second, SIZE * tensors[1] + sum(range(SIZE)))


@pytest.mark.four_ranks
def test_state_of_a_sharded_model():
    mesh = parallel.Mesh(model=2)

    def run(**options):
        keras.utils.set_random_seed(3)
        with mesh:
            layer = parallel.ColumnParallelDense(17)
            layer.build((None, 13))
        # Sizes of shards of the layer: shards of replicas must not depend on them.
        replicas = [np.ones(shape, "float32") for shape in ([5, 7], [9], [8])]
        weights = [*layer.weights, *map(keras.Variable, replicas)]
        optimizer = hvd.DistributedOptimizer(
            optimizers.Adam(0.01, global_clipnorm=0.1), mesh=mesh, **options
        )
        for step in range(STEPS):
            gradients = [
                draw([w.shape], step, mesh.data.index, *position(w))[0] for w in weights
            ]
            optimizer.apply(list(map(tf.constant, gradients)), weights)
        return [w.numpy() for w in weights], optimizer

    def position(weight):
        return [mesh.model.index] if get_sharding(weight) else []

    expected, replicated = run()
    found, optimizer = run(shard_state=True)
    assert_equal(found, expected, "weights", rtol=1e-5)
    slots, others = slots_of(optimizer), slots_of(replicated)
    if RANK == 0:
        assert_equal(slots, others, "slots", rtol=1e-5)
    mesh.remove()


# Of newer versions of Keras.
@pytest.mark.skipif(
    not hasattr(optimizers, "ScheduleFreeAdamW"),
    reason="Keras has no ScheduleFreeAdamW",
)
class TestSlotsThatStartAsCopiesOfTheWeights:
    """On ranks that are seeded differently, of which rank 0's weights are taken."""

    def fit(self, shard_state, *, is_broadcast=True, prepare=None, seed=RANK):
        model = oracle.build_model()
        model.set_weights(draw([weight.shape for weight in model.weights], seed))
        optimizer = hvd.DistributedOptimizer(
            optimizers.ScheduleFreeAdamW(0.1), shard_state=shard_state
        )
        # Tracing would take longer than the four steps.
        model.compile(optimizer, oracle.LOSS, run_eagerly=True)
        if prepare:
            prepare(model)
        callbacks = [hvd.callbacks.ConsistencyCheckCallback()]
        if is_broadcast:
            callbacks.insert(0, hvd.callbacks.BroadcastGlobalVariablesCallback(0))
        else:
            hvd.broadcast_variables(model.variables + optimizer.variables, 0)
        oracle.fit_shard(model, *oracle.samples(4), callbacks=callbacks)
        return model.get_weights()

    def test_they_are_copies_of_those_of_rank_0(self):
        assert_equal(self.fit(True), self.fit(False), "weights", rtol=1e-5)

    def test_they_may_be_copies_of_older_weights(self):
        def prepare(model):
            model.optimizer.build(model.trainable_variables)
            if RANK == 0:
                model.set_weights([weight + 1 for weight in model.get_weights()])

        expected = self.fit(False, prepare=prepare, seed=1)
        assert_equal(self.fit(True, prepare=prepare, seed=1), expected, "older")
        with pytest.raises(ValueError, match=r"weights of rank 0 that were assigned"):
            self.fit(True, prepare=prepare)

    def test_a_broadcast_that_leaves_them_is_an_error(self):
        def prepare(model):
            model.optimizer.build(model.trainable_variables)

        with pytest.raises(
            hvd.callbacks.DesynchronizedError, match="from different ones"
        ):
            self.fit(True, prepare=prepare, is_broadcast=False)


def test_slots_that_equal_a_bias_are_no_copies_of_the_weights():
    def fit(shard_state):
        keras.utils.set_random_seed(RANK)
        # The value that the accumulators of Adagrad start with.
        start = keras.initializers.Constant(0.1)
        layer = keras.layers.Dense(oracle.CLASSES, "softmax", bias_initializer=start)
        model = keras.Sequential([keras.Input((oracle.FEATURES,)), layer])
        optimizer = hvd.DistributedOptimizer(
            optimizers.Adagrad(0.1), shard_state=shard_state
        )
        model.compile(optimizer, oracle.LOSS)
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        oracle.fit_shard(model, *oracle.samples(4), callbacks=callbacks)
        return model.get_weights()

    assert_equal(fit(True), fit(False), "weights")


def check_a_state_that_rank_0_alone_has_loaded(mesh=None):
    model = oracle.build_model()
    optimizer = hvd.DistributedOptimizer(
        optimizers.Adam(0.01), shard_state=True, mesh=mesh
    )
    optimizer.build(model.trainable_variables)
    optimizer.iterations.assign(5 if RANK == 0 else 0)
    model.compile(optimizer, oracle.LOSS)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    with pytest.raises(ValueError, match=r"only some of them have loaded .* 5, 0"):
        oracle.fit_shard(model, *oracle.samples(1), callbacks=callbacks)


def test_a_state_that_rank_0_alone_has_loaded_is_an_error():
    check_a_state_that_rank_0_alone_has_loaded()


@pytest.mark.four_ranks
def test_such_a_state_is_an_error_on_all_ranks_of_a_mesh():
    mesh = parallel.Mesh(model=SIZE // 2)
    check_a_state_that_rank_0_alone_has_loaded(mesh)
    mesh.remove()


@pytest.mark.four_ranks
def test_fit_of_a_sharded_model():
    mesh = parallel.Mesh(model=2)
    inputs, labels = oracle.samples(3)
    samples = slice(mesh.data.index, None, mesh.data.size)

    def fitted(shard_state):
        keras.utils.set_random_seed(3)
        with mesh:
            # Of its kernel and its bias, one data rank has both.
            layer = parallel.RowParallelDense(oracle.CLASSES, "softmax")
        model = keras.Sequential([keras.Input((oracle.FEATURES,)), layer])
        optimizer = optimizers.Adam(0.1)
        model.compile(
            hvd.DistributedOptimizer(optimizer, mesh=mesh, shard_state=shard_state),
            oracle.LOSS,
        )
        oracle.fit(model, inputs[samples], labels[samples], 2 * oracle.LOCAL_BATCH_SIZE)
        return model.get_weights()

    expected = fitted(False)
    assert_equal(fitted(True), expected, "weights")
    mesh.remove()


@pytest.mark.parametrize("shard_state", [False, True])
def test_gradients_are_weighted_before_they_are_reduced(shard_state):
    weight = keras.Variable(np.zeros(40, "float32"))
    optimizer = hvd.DistributedOptimizer(optimizers.SGD(1.0), shard_state=shard_state)
    optimizer.reduction_hook.weigh_gradients(1.0 + RANK)
    optimizer.apply([tf.fill([40], 2.0)], [weight])
    expected = -2.0 * np.mean(np.arange(SIZE) + 1.0)
    np.testing.assert_allclose(weight, np.full(40, expected), rtol=1e-6)
