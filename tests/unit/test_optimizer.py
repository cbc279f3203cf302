"""The distributed optimizer in one process: its arguments, and saved models."""

import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain import parallel
from hvdtrain.keras.replication import get_hook
from hvdtrain.keras.variables import owned_slots

EMBEDDING = keras.layers.Embedding


@pytest.fixture(scope="module", autouse=True)
def _horovod():
    hvd.init()


def sgd(**args):
    return keras.optimizers.SGD(0.1, **args)


needs_multi_optimizer = pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has none"
)


def multi_optimizer(kernels):
    optimizers = keras.optimizers.OptimizerMap(
        keras.optimizers.Adam(), {".*kernel": kernels}
    )
    return keras.optimizers.MultiOptimizer(optimizers)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"op": hvd.Max}, "hvd.Average or hvd.Sum"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "requires op=hvd.Average"),
        ({"gradient_predivide_factor": 0.0}, "must be positive"),
        ({"groups": 0}, "positive number of groups"),
        ({"groups": "all"}, "positive number of groups"),
        ({"backward_passes_per_step": 0}, "positive integer"),
        ({"shard_state": "slices"}, r"True or False.* parallel\.fully_shard"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        hvd.DistributedOptimizer(sgd(), **arguments)


def test_ranks_of_an_elastic_job_do_not_shard_state(monkeypatch):
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    with pytest.raises(ValueError, match="fixed number of ranks"):
        hvd.DistributedOptimizer(sgd(), shard_state=True)


@pytest.mark.parametrize("optimizer", ["sgd", None, keras.optimizers.SGD])
def test_only_an_optimizer_instance_is_taken(optimizer):
    with pytest.raises(TypeError, match=r"instance of keras\.optimizers\.Optimizer"):
        hvd.DistributedOptimizer(optimizer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": [keras.Variable(1.0)]}, "list of lists of variables"),
        ({"compression": "fp16"}, "Received: 'fp16'"),
        ({"op": hvd.Min}, "op=hvd.Min"),
    ],
)
def test_options_of_a_tape_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        hvd.DistributedGradientTape(tf.GradientTape(), **options)


def test_an_optimizer_that_is_not_built_remains_usable():
    variable = keras.Variable([1.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    with pytest.raises(ValueError, match="built"):
        optimizer.apply([tf.constant([1.0])])
    optimizer.apply([tf.constant([1.0])], [variable])
    assert float(variable[0]) == 0.0


def test_an_optimizer_is_distributed_once():
    optimizer = hvd.DistributedOptimizer(sgd())
    with pytest.raises(ValueError, match="distributed already"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(ValueError, match="distributed already"):
        hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))


def test_two_windows_of_accumulation_contradict_each_other():
    with pytest.raises(ValueError, match="are one number"):
        hvd.DistributedOptimizer(
            sgd(gradient_accumulation_steps=2), backward_passes_per_step=3
        )


def test_a_built_optimizer_has_no_room_to_accumulate():
    optimizer = sgd()
    optimizer.build([keras.Variable([1.0])])
    with pytest.raises(ValueError, match="not been built"):
        hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2)


def test_num_groups_is_deprecated():
    with pytest.warns(DeprecationWarning, match="use groups"):
        hvd.DistributedOptimizer(sgd(), num_groups=2)


def test_an_optimizer_that_skips_the_hook_is_not_silent():
    class Unhooked(keras.optimizers.SGD):
        def _backend_apply_gradients(self, grads, trainable_variables):
            self._backend_update_step(grads, trainable_variables, self.learning_rate)

    variable = keras.Variable([1.0])
    optimizer = hvd.DistributedOptimizer(Unhooked(0.1))
    with pytest.raises(RuntimeError, match="not reduced over the ranks"):
        optimizer.apply_gradients([(np.ones(1, "float32"), variable)])


@pytest.fixture
def gpu(monkeypatch):
    """Keras finds a GPU."""
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda *_: [gpu])


@pytest.mark.parametrize(
    ("arguments", "is_on", "warnings"),
    [
        ({}, False, 1),
        ({"jit_compile": False}, False, 0),
        ({"jit_compile": True}, True, 0),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_the_default_xla_of_gpus_is_disabled_with_a_warning(
    recwarn, arguments, is_on, warnings
):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    # A call before this one has chosen otherwise.
    model.compile(hvd.DistributedOptimizer(sgd()), "mse")
    model.compile(hvd.DistributedOptimizer(sgd()), "mse", **arguments)
    assert model.jit_compile == (is_on or not arguments), "what Keras decides"
    config = json.loads(json.dumps(model.get_compile_config()))
    assert config["jit_compile"] == model.jit_compile
    for _ in range(2):
        hvd.callbacks.BroadcastGlobalVariablesCallback(0).set_model(model)
    assert model.jit_compile == is_on
    about_xla = [str(w.message) for w in recwarn if "XLA" in str(w.message)]
    assert len(about_xla) == warnings
    assert all("jit_compile=False" in text for text in about_xla)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("choose", "is_on"),
    [
        (lambda model: model.compile(model.optimizer, "mse", jit_compile=True), True),
        (lambda model: setattr(model, "jit_compile", True), True),
        (lambda model: model.compile(model.optimizer, "mse"), False),
        # Keras resolves this one when the value is read.
        (lambda model: setattr(model, "jit_compile", None), False),
    ],
)
def test_xla_that_is_chosen_after_the_default_stays(choose, is_on):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(sgd(), "mse")
    choose(model)
    hvd.DistributedOptimizer(model.optimizer)
    hvd.callbacks.BroadcastGlobalVariablesCallback(0).set_model(model)
    assert model.jit_compile == is_on


def test_no_gradients_are_no_error():
    hvd.DistributedOptimizer(sgd()).apply([], [])


@pytest.mark.parametrize(
    ("name", "slots"), [("Adafactor", 6), ("Adam", 4), ("Muon", 3), ("Nadam", 4)]
)
def test_slots_belong_to_weights_and_numbers_to_none(name, slots):
    # As many weights as an optimizer has numbers: the learning rate and the iteration.
    weights = [keras.Variable(tf.ones([3, 3]), name="a")]
    weights.append(keras.Variable(tf.ones([3]), name="a_b"))
    optimizer = getattr(keras.optimizers, name)()
    optimizer.build(weights)
    for each in (optimizer, keras.optimizers.LossScaleOptimizer(optimizer)):
        owned = {id(slot) for slot, _ in owned_slots(each, weights)}
        assert len(owned) == slots
        common = [v for v in each.variables if id(v) not in owned]
        assert all(len(variable.shape) == 0 for variable in common)


@pytest.mark.parametrize(
    ("embedding", "expected"),
    [
        # 4 / sqrt(4): Keras adds up the squares of the four samples' gradients.
        (EMBEDDING, -0.2),
        (parallel.ShardedEmbedding, -0.1),
        (lambda *shape: parallel.DistributedEmbedding([EMBEDDING(*shape)]), -0.1),
    ],
)
@pytest.mark.parametrize("is_tape", [False, True])
def test_sharded_tables_add_up_the_gradients_of_a_row(embedding, expected, is_tape):
    layer = embedding(3, 1)
    adam = keras.optimizers.Adam(0.1)
    optimizer = adam if is_tape else hvd.DistributedOptimizer(adam)
    layer.build([None])
    (table,) = layer.trainable_variables
    before = table.numpy()
    tape = tf.GradientTape()
    ids = tf.constant([1, 1])
    ids = [ids] if isinstance(layer, parallel.DistributedEmbedding) else ids
    with hvd.DistributedGradientTape(tape) if is_tape else tape as tape:
        outputs = keras.tree.flatten([layer(ids) for _ in range(2)])
        loss = tf.add_n(list(map(tf.reduce_sum, outputs)))
    optimizer.apply([tape.gradient(loss, table.value)], [table])
    np.testing.assert_allclose(table - before, [[0], [expected], [0]], atol=1e-5)


# One process loads all models, named after what to expect of them.
LOAD_WITHOUT_HVDTRAIN = """
import pathlib, sys
sys.modules["hvdtrain"] = None
sys.modules["horovod"] = None
import keras, numpy
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.keras")):
    _, policy, loaded_class = path.stem.split("-")
    keras.config.set_dtype_policy(policy)
    model = keras.models.load_model(path)
    assert type(model.optimizer).__name__ == loaded_class, model.optimizer
    state = [variable.numpy() for variable in model.optimizer.variables]
    numpy.savez(path.with_suffix(".npz"), *state)
"""


def train_and_save(optimizer, policy, path):
    """Return the state of the optimizer that was saved."""
    keras.config.set_dtype_policy(policy)
    try:
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile(hvd.DistributedOptimizer(optimizer), "mse")
        start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        model.fit(np.ones((8, 3)), np.ones((8, 2)), verbose=0, callbacks=[start])
    finally:
        keras.config.set_dtype_policy("float32")
    model.save(path)
    return [variable.numpy() for variable in model.optimizer.variables]


@pytest.mark.long
def test_saved_models_load_without_this_package(tmp_path):
    scaled = keras.optimizers.LossScaleOptimizer(sgd(momentum=0.9))
    optimizers = {
        "1-float32-Adam": keras.optimizers.Adam(0.01),
        "2-mixed_float16-LossScaleOptimizer": sgd(momentum=0.9),
        "3-mixed_float16-LossScaleOptimizer": scaled,
    }
    if hasattr(keras.optimizers, "MultiOptimizer"):
        optimizers["4-float32-MultiOptimizer"] = multi_optimizer(sgd(momentum=0.9))
    expected = {
        name: train_and_save(optimizer, name.split("-")[1], tmp_path / f"{name}.keras")
        for name, optimizer in optimizers.items()
    }
    subprocess.run(
        [sys.executable, "-c", LOAD_WITHOUT_HVDTRAIN, tmp_path],
        check=True,
        timeout=120,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    for name, state in expected.items():
        loaded = np.load(tmp_path / f"{name}.npz")
        assert len(loaded.files) == len(state)
        for key, value in zip(loaded.files, state, strict=True):
            np.testing.assert_array_equal(loaded[key], value)


@needs_multi_optimizer
def test_what_a_multi_optimizer_cannot_do_is_refused():
    with pytest.raises(ValueError, match="Give them gradient_accumulation_steps"):
        hvd.DistributedOptimizer(multi_optimizer(sgd()), backward_passes_per_step=2)
    with pytest.raises(ValueError, match="Use shard_state=False"):
        hvd.DistributedOptimizer(multi_optimizer(sgd()), shard_state=True)
    with pytest.raises(ValueError, match="distributed already"):
        hvd.DistributedOptimizer(multi_optimizer(hvd.DistributedOptimizer(sgd())))
    optimizer = multi_optimizer(sgd(gradient_accumulation_steps=2))
    hook = get_hook(hvd.DistributedOptimizer(optimizer))
    with pytest.raises(ValueError, match="the accumulated ones would keep the NaN"):
        hook.skip_nonfinite()
