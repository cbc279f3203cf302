"""N ranks take the steps of one process with the N-times batch."""

import functools
import inspect
import pathlib

import horovod.tensorflow.keras as upstream
import keras
import numpy as np
import oracle
import pytest
import tensorflow as tf
from horovod.tensorflow import mpi_ops

import hvdtrain.keras as hvd
from hvdtrain.collectives import transport
from hvdtrain.collectives.transport import native_reduction

PACKAGE = str(pathlib.Path(transport.__file__).parents[2])

OPTIMIZERS = {
    "sgd": lambda **args: keras.optimizers.SGD(0.1, **args),
    "momentum": lambda **args: keras.optimizers.SGD(0.1, momentum=0.9, **args),
    "adam": lambda **args: keras.optimizers.Adam(0.01, **args),
}
# Thresholds far below the norms of the gradients: every step is clipped.
FEATURES = {
    "plain": {},
    "clipnorm": {"clipnorm": 0.02},
    "clipvalue": {"clipvalue": 0.005},
    "global_clipnorm": {"global_clipnorm": 0.02},
    "accumulation": {"gradient_accumulation_steps": 2},
    "accumulation_and_clipping": {
        "gradient_accumulation_steps": 2,
        "global_clipnorm": 0.02,
    },
    "weight_decay": {"weight_decay": 0.1},
    "ema": {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 3},
    "steps_per_execution": {},
}
# The others change the step after the reduction, by the same values on every rank.
MARKS = {
    "plain": [pytest.mark.ranks, pytest.mark.four_ranks],
    "accumulation_and_clipping": [pytest.mark.four_ranks],
    # Keras clips by all three norms in one place, and decays before the moving average.
    "clipnorm": [pytest.mark.release],
    "clipvalue": [pytest.mark.release],
    "weight_decay": [pytest.mark.release],
}
TOLERANCE = 1e-6


def compile_args(feature):
    return {"steps_per_execution": 4} if feature == "steps_per_execution" else {}


@functools.cache
def big_batch_weights(optimizer, feature):
    def train():
        model = oracle.train_by_fit(
            OPTIMIZERS[optimizer](**FEATURES[feature]),
            *oracle.samples(),
            oracle.LOCAL_BATCH_SIZE * hvd.size(),
            **compile_args(feature),
        )
        return model.get_weights()

    return oracle.on_one_process(train)


def distributed(optimizer, feature="plain", **args):
    return hvd.DistributedOptimizer(OPTIMIZERS[optimizer](**FEATURES[feature]), **args)


def train_shard(optimizer, train=oracle.train_by_fit, **args):
    inputs, labels = oracle.samples()
    return train(
        optimizer,
        oracle.shard(inputs),
        oracle.shard(labels),
        oracle.LOCAL_BATCH_SIZE,
        **args,
    )


def check_against_big_batch(model, optimizer, feature="plain", tolerance=TOLERANCE):
    weights = model.get_weights()
    expected = big_batch_weights(optimizer, feature)
    assert oracle.difference(weights, expected) <= tolerance
    oracle.assert_bitwise_equal_over_ranks(weights)


# Every feature with one optimizer, and the optimizer whose step is the least like it
# with one: the reduction comes before the optimizer's step, which is Keras' own. The
# others are in test_matrix.py.
FIT = [
    *(
        pytest.param("momentum", feature, marks=MARKS.get(feature, ()))
        for feature in FEATURES
    ),
    ("adam", "accumulation_and_clipping"),
]


@pytest.mark.parametrize(("optimizer", "feature"), FIT)
def test_fit_equals_the_big_batch(optimizer, feature):
    model = train_shard(distributed(optimizer, feature), **compile_args(feature))
    check_against_big_batch(model, optimizer, feature)


# A step and a loop of a user's own call the same method of the optimizer as fit. What
# can differ: steps per execution, windows of accumulation, the end of the training.
# Without is_built, the first trace of the step creates the optimizer's variables.
@pytest.mark.parametrize(
    "feature",
    [
        "accumulation_and_clipping",
        pytest.param("ema", marks=pytest.mark.release),
        "steps_per_execution",
    ],
)
def test_train_step_equals_the_big_batch(feature):
    model = train_shard(
        distributed("momentum", feature),
        model_class=oracle.CustomStepModel,
        is_built=False,
        **compile_args(feature),
    )
    check_against_big_batch(model, "momentum", feature)


@pytest.mark.parametrize(
    "feature",
    [
        "accumulation_and_clipping",
        "ema",
        pytest.param("plain", marks=pytest.mark.release),
    ],
)
def test_custom_loop_equals_the_big_batch(feature):
    model = train_shard(distributed("momentum", feature), oracle.train_by_loop)
    check_against_big_batch(model, "momentum", feature)


# Steps at a stretch compute what the plain optimizer computes.
@pytest.mark.parametrize(
    "feature",
    [
        pytest.param(feature, marks=MARKS.get(feature, ()))
        for feature in FEATURES
        if feature not in ("plain", "steps_per_execution")
    ],
)
def test_the_oracle_sees_a_feature(feature):
    """A feature that changed nothing would prove nothing above."""
    plain = big_batch_weights("momentum", "plain")
    weights = big_batch_weights("momentum", feature)
    assert oracle.difference(weights, plain) > 1e-3


@pytest.mark.parametrize("wrap", [upstream.DistributedOptimizer, lambda opt: opt])
def test_the_oracle_sees_a_missing_reduction(wrap):
    """Horovod's own optimizer, on Keras 3, trains every rank alone."""
    model = train_shard(wrap(OPTIMIZERS["momentum"]()))
    weights = model.get_weights()
    assert oracle.difference(weights, big_batch_weights("momentum", "plain")) > 1e-2


def test_eager_fit_equals_the_big_batch():
    model = train_shard(
        distributed("adam", "accumulation_and_clipping"), run_eagerly=True
    )
    check_against_big_batch(model, "adam", "accumulation_and_clipping")


def test_sum_is_the_average_times_the_number_of_ranks():
    optimizer = keras.optimizers.SGD(0.1 / hvd.size(), momentum=0.9)
    model = train_shard(hvd.DistributedOptimizer(optimizer, op=hvd.Sum))
    check_against_big_batch(model, "momentum")


@pytest.mark.parametrize("groups", [3, 100])
def test_number_of_groups_does_not_change_the_result(groups):
    check_against_big_batch(
        train_shard(distributed("momentum", groups=groups)), "momentum"
    )


def test_groups_of_variables_do_not_change_the_result():
    model = oracle.build_model()
    first, second = model.layers
    groups = [[first.kernel, second.bias], [first.bias]]
    model.compile(distributed("momentum", groups=groups), oracle.LOSS)
    oracle.fit_shard(model, *oracle.samples())
    check_against_big_batch(model, "momentum")


@pytest.mark.ranks
def test_predivide_factor_does_not_change_the_result():
    optimizer = distributed("momentum", gradient_predivide_factor=float(hvd.size()))
    check_against_big_batch(train_shard(optimizer), "momentum")


@pytest.mark.parametrize(
    ("compression", "tolerance"),
    # 20 steps of gradients rounded to 11 and 8 significant bits.
    [
        (hvd.Compression.fp16, 1e-3),
        (hvd.Compression.bf16, 8e-3),
    ],
)
def test_compression_stays_near_the_big_batch(compression, tolerance):
    model = train_shard(distributed("momentum", compression=compression))
    check_against_big_batch(model, "momentum", tolerance=tolerance)
    exact = big_batch_weights("momentum", "plain")
    assert oracle.difference(model.get_weights(), exact) > TOLERANCE


@pytest.mark.parametrize("averages", [True, False])
def test_backward_passes_per_step_is_accumulation(averages):
    """Horovod sums the passes, except with average_aggregated_gradients=True."""
    rate = 0.1 if averages else 0.1 / 2
    model = train_shard(
        hvd.DistributedOptimizer(
            keras.optimizers.SGD(rate, momentum=0.9),
            backward_passes_per_step=2,
            average_aggregated_gradients=averages,
        )
    )
    check_against_big_batch(model, "momentum", "accumulation")


def train_embedding(optimizer, tokens, labels, batch_size):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            keras.layers.Embedding(11, 4),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(2, activation="softmax"),
        ]
    )
    model.compile(optimizer, oracle.LOSS)
    oracle.build_optimizer(model)
    oracle.fit(model, tokens, labels, batch_size)
    return model.get_weights()


@pytest.mark.parametrize(
    ("optimizer", "sparse_as_dense"),
    # Not Adam on dense ones: Keras itself treats the rows without gradient differently.
    [
        ("sgd", False),
        pytest.param("adam", False, marks=pytest.mark.ranks),
        ("sgd", True),
    ],
)
def test_sparse_gradients_equal_the_big_batch(optimizer, sparse_as_dense):
    rng = np.random.default_rng(1)
    count = 8 * 4 * hvd.size()
    tokens = rng.integers(0, 11, (count, 5)).astype("int32")
    labels = rng.integers(0, 2, count)
    expected = oracle.on_one_process(
        lambda: train_embedding(OPTIMIZERS[optimizer](), tokens, labels, 4 * hvd.size())
    )
    weights = train_embedding(
        distributed(optimizer, sparse_as_dense=sparse_as_dense),
        oracle.shard(tokens),
        oracle.shard(labels),
        4,
    )
    assert oracle.difference(weights, expected) <= TOLERANCE
    oracle.assert_bitwise_equal_over_ranks(weights)


@pytest.mark.ranks
def test_local_variables_keep_their_own_gradients():
    """A local bias takes this rank's gradient, divided by the number of ranks."""
    model = oracle.build_model()
    bias = model.layers[-1].bias
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.register_local_var(bias)
    gradients = [np.full(v.shape, 1.0 + hvd.rank(), "float32") for v in model.weights]
    before = [v.numpy() for v in model.weights]
    optimizer.apply_gradients(zip(gradients, model.weights, strict=True))
    mean = 1.0 + (hvd.size() - 1) / 2
    for variable, old in zip(model.weights, before, strict=True):
        local = (1.0 + hvd.rank()) / hvd.size()
        expected = local if variable is bias else mean
        np.testing.assert_allclose(old - variable.numpy(), expected, rtol=1e-5)


def test_a_built_optimizer_keeps_its_state():
    model = train_shard(OPTIMIZERS["adam"]())
    before = [v.numpy() for v in model.optimizer.variables]
    assert hvd.DistributedOptimizer(model.optimizer) is model.optimizer
    for variable, old in zip(model.optimizer.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), old)


@pytest.fixture
def one_variable():
    """An optimizer, its variable, a gradient that differs by rank, and their mean."""
    variable = keras.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([variable])
    return optimizer, variable, tf.constant([1.0 + hvd.rank()]), (hvd.size() + 1) / 2


@pytest.mark.parametrize("wrap", [lambda step: step, tf.function])
def test_variables_may_be_an_iterator(one_variable, wrap):
    optimizer, variable, gradient, mean = one_variable
    wrap(lambda: optimizer.apply(iter([gradient]), (v for v in [variable])))()
    assert float(variable[0]) == pytest.approx(-mean)


@pytest.mark.parametrize("method", ["apply", "apply_gradients"])
def test_a_step_in_a_users_own_branch(one_variable, method):
    """All ranks take the same branch, so the reduction in it is right."""
    optimizer, variable, gradient, mean = one_variable

    def step():
        if method == "apply":
            optimizer.apply([gradient], [variable])
        else:
            optimizer.apply_gradients([(gradient, variable)])
        return 0

    function = tf.function(
        lambda: tf.cond(optimizer.iterations.value < 1, step, lambda: 1)
    )
    for _ in range(2):
        function()
        assert float(variable[0]) == pytest.approx(-mean)


def test_adasum_is_refused_by_name():
    with pytest.raises(ValueError, match=r"op=hvd\.Adasum.*DistributedGradientTape"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Adasum)


@pytest.fixture
def frames(monkeypatch):
    """Per reduction, the names of the package's functions on the stack."""
    seen = []

    def watch(module, name):
        operation = getattr(module, name)

        def spy(*args, **options):
            stack = [frame for frame in inspect.stack() if PACKAGE in frame.filename]
            seen.append([frame.function for frame in stack])
            return operation(*args, **options)

        monkeypatch.setattr(module, name, spy)

    watch(mpi_ops, "_grouped_allreduce")
    watch(native_reduction, "allreduce")
    return seen


def test_a_gradient_is_explained_in_nine_frames(frames, one_variable):
    optimizer, variable, gradient, _ = one_variable
    optimizer.apply_gradients([(gradient, variable)])
    # The reduction before it compares the ranks' weights in the first step.
    assert len(frames[-1]) <= 9, frames


def test_a_public_allreduce_adds_two_frames_to_the_transport(frames):
    transport.allreduce([1.0], transport.Reduction())
    hvd.allreduce(1.0)
    # Before them, the ranks have gathered the outcome of the test's set-up.
    assert len(frames[-1]) == len(frames[-2]) + 2, frames
