"""Models that come back with their optimizer distributed and its state intact."""

import h5py
import keras
import numpy as np
import oracle
import pytest

import hvdtrain.keras as hvd
from hvdtrain.keras.variables import is_distributed

INPUTS, LABELS = oracle.samples(steps=6)
GLOBAL_BATCH_SIZE = oracle.LOCAL_BATCH_SIZE * hvd.size()
FIRST, SECOND = slice(0, 3 * GLOBAL_BATCH_SIZE), slice(3 * GLOBAL_BATCH_SIZE, None)


class OwnMomentum(keras.optimizers.SGD):
    """An optimizer class of a user's own."""


@keras.saving.register_keras_serializable(package="test")
class OwnLayer(keras.layers.Layer):
    def call(self, inputs):
        return 2.0 * inputs


def own_loss(labels, outputs):
    return keras.losses.sparse_categorical_crossentropy(labels, outputs)


def fit(model, part):
    first = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    oracle.fit_shard(model, INPUTS[part], LABELS[part], callbacks=[first])


def uninterrupted(make_optimizer, loss=oracle.LOSS):
    """One process, the big batch, never saved."""
    model = oracle.build_model()
    model.compile(make_optimizer(), loss)
    oracle.fit_big_batch(model, INPUTS, LABELS)
    return model.get_weights()


def save_half_way(make_optimizer, path, loss=oracle.LOSS, part=FIRST, **distribution):
    model = oracle.build_model()
    model.compile(hvd.DistributedOptimizer(make_optimizer(), **distribution), loss)
    fit(model, part)
    model.save(path)
    return model


@pytest.mark.parametrize(
    ("extension", "make"),
    [
        ("keras", lambda: keras.optimizers.Adam(0.05, global_clipnorm=0.5)),
        pytest.param(
            *("h5", lambda: keras.optimizers.SGD(0.1, momentum=0.9)),
            marks=pytest.mark.release,
        ),
    ],
)
def test_training_goes_on_where_it_was(tmp_path, extension, make):
    path = tmp_path / f"{hvd.rank()}.{extension}"
    saved = save_half_way(make, path)
    model = hvd.load_model(path)
    assert is_distributed(model.optimizer)
    assert type(model.optimizer) is type(saved.optimizer)
    states = [np.asarray(v) for v in saved.optimizer.variables]
    for variable, state in zip(model.optimizer.variables, states, strict=True):
        np.testing.assert_array_equal(variable, state)
    fit(model, SECOND)
    assert oracle.difference(model.get_weights(), uninterrupted(make)) < 1e-6
    oracle.assert_bitwise_equal_over_ranks(model.get_weights())


@pytest.mark.parametrize(
    "extension", ["keras", pytest.param("h5", marks=pytest.mark.release)]
)
def test_classes_and_functions_of_a_users_own(tmp_path, extension):
    def make():
        return OwnMomentum(0.1, momentum=0.9)

    path = tmp_path / f"{hvd.rank()}.{extension}"
    save_half_way(make, path, own_loss)
    model = hvd.load_model(
        path,
        custom_optimizers=[OwnMomentum],
        custom_objects={"own_loss": own_loss},
    )
    assert type(model.optimizer) is OwnMomentum
    fit(model, SECOND)
    assert oracle.difference(model.get_weights(), uninterrupted(make, own_loss)) < 1e-6


def test_a_function_in_place_of_the_optimizer_s_class(tmp_path):
    """As scripts of Keras 2 do: docs/moving/errors.md."""
    path = tmp_path / f"{hvd.rank()}.keras"
    model = oracle.build_model()
    model.compile(keras.optimizers.Adam(0.05), oracle.LOSS)
    model.save(path)
    objects = {
        "Adam": lambda **options: hvd.DistributedOptimizer(
            keras.optimizers.Adam(**options)
        )
    }
    # Keras does not call it.
    plain = keras.models.load_model(path, custom_objects=objects)
    assert not is_distributed(plain.optimizer)
    if hvd.size() > 1:
        with pytest.raises(ValueError, match=r"not distributed.*hvd\.load_model"):
            fit(plain, SECOND)
    loaded = hvd.load_model(path, custom_objects=objects)
    assert is_distributed(loaded.optimizer)


@pytest.mark.parametrize(
    "extension", ["keras", pytest.param("h5", marks=pytest.mark.release)]
)
def test_loss_scale_survives(tmp_path, extension):
    keras.config.set_dtype_policy("mixed_float16")
    path = tmp_path / f"{hvd.rank()}.{extension}"
    model = oracle.build_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), oracle.LOSS)
    fit(model, FIRST)
    # The first scale may be too large for the data.
    steps = int(model.optimizer.inner_optimizer.iterations)
    model.optimizer.dynamic_scale.assign(1024.0)
    model.save(path)
    loaded = hvd.load_model(path)
    assert isinstance(loaded.optimizer, keras.optimizers.LossScaleOptimizer)
    assert is_distributed(loaded.optimizer)
    assert float(loaded.optimizer.dynamic_scale) == 1024.0
    assert int(loaded.optimizer.inner_optimizer.iterations) == steps
    fit(loaded, SECOND)
    assert int(loaded.optimizer.inner_optimizer.iterations) == steps + 3
    oracle.assert_bitwise_equal_over_ranks(loaded.get_weights())


def test_an_open_h5_file(tmp_path):
    path = tmp_path / f"{hvd.rank()}.h5"
    model = oracle.build_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), oracle.LOSS)
    model.save(path)
    with h5py.File(path) as file:
        assert is_distributed(hvd.load_model(file).optimizer)


def test_a_model_that_was_not_compiled(tmp_path):
    path = tmp_path / f"{hvd.rank()}.keras"
    oracle.build_model().save(path)
    model = hvd.load_model(path)
    assert getattr(model, "optimizer", None) is None


def test_a_compressed_model(tmp_path):
    path = tmp_path / f"{hvd.rank()}.keras"
    save_half_way(keras.optimizers.SGD, path)
    model = hvd.load_model(path, compression=hvd.Compression.fp16)
    fit(model, SECOND)
    difference = oracle.difference(
        model.get_weights(), uninterrupted(keras.optimizers.SGD)
    )
    assert difference < 1e-4


@pytest.mark.parametrize(
    "extension", [pytest.param("keras", marks=pytest.mark.release), "h5"]
)
def test_arguments_of_the_distributed_optimizer(tmp_path, extension):
    path = tmp_path / f"{hvd.rank()}.{extension}"
    distribution = {"op": hvd.Sum, "groups": 2, "backward_passes_per_step": 2}
    rate, windows = 0.01, slice(0, 4 * GLOBAL_BATCH_SIZE)
    save_half_way(
        lambda: keras.optimizers.SGD(rate, momentum=0.9),
        path,
        part=windows,
        **distribution,
    )
    model = hvd.load_model(path, **distribution)
    fit(model, slice(windows.stop, None))
    # A sum over ranks and passes is that many times the mean.
    expected = uninterrupted(
        lambda: keras.optimizers.SGD(
            rate * hvd.size() * 2, momentum=0.9, gradient_accumulation_steps=2
        )
    )
    assert oracle.difference(model.get_weights(), expected) < 1e-6


def test_a_built_optimizer_keeps_its_state():
    optimizer = keras.optimizers.Adam(0.05)
    model = oracle.build_model()
    optimizer.build(model.trainable_variables)
    optimizer.iterations.assign(7)
    optimizer.variables[2].assign(np.full(optimizer.variables[2].shape, 0.5))
    distributed = hvd.DistributedOptimizer(optimizer)
    assert distributed is optimizer
    assert int(distributed.iterations) == 7
    model.compile(distributed, oracle.LOSS)
    fit(model, FIRST)
    assert int(model.optimizer.iterations) == 10


def test_legacy_optimizers_do_not_exist_in_keras_3():
    with pytest.raises(ValueError, match="Keras 3 does not"):
        hvd.load_model("model.h5", legacy_opts=True)
