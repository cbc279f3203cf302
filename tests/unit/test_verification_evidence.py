"""What a verification records of a script, and the reasons that it finds in it."""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import random_seed

from hvdtrain.verify import capture, causes, comparison, left_out, rank_values
from hvdtrain.verify.batches_by_rank import BatchReplacer
from hvdtrain.verify.comparison import Difference
from hvdtrain.verify.decisions import Decisions, note_decisions
from hvdtrain.verify.evidence import Evidence
from hvdtrain.verify.first_gradients import FirstGradients, note_first_gradients
from hvdtrain.verify.gradient_norms import differ_by_rank, factor_of_size
from hvdtrain.verify.graph_constants import constants
from hvdtrain.verify.noise import Draws, Noise, exchange_noise
from hvdtrain.verify.phases import Verification
from hvdtrain.verify.samples import Samples
from hvdtrain.verify.shuffles import shuffles_before_shard
from hvdtrain.verify.step_recorder import FinishedError, StepRecorder
from hvdtrain.verify.traced_reductions import ClippedTensors
from hvdtrain.verify.trajectory import Directory, Facts, Reductions, State, digest
from hvdtrain.verify.variable_names import VariableNames
from hvdtrain.verify.written_files import noted_files


def facts(*, reductions=(), **values):
    """Facts of a script that reduces the gradients of its only weight."""
    reductions = {"kinds": [("Average", "NoneCompressor")], "names": {"w"}} | dict(
        reductions
    )
    defaults = {
        "loss_reductions": ["sum_over_batch_size"],
        "local_normalizations": [],
        "masking_layers": [],
        "regularized_layers": [],
        "learned": {},
        "class_weights": "",
        "seeds": {},
        "batch_losses": [],
        "unreduced": [],
        "trained": ["w"],
        "untrained": {},
        "made_untrained": [],
        "gradients": {"w": 1.0},
        "other_draws": [],
        "left_out": [],
    }
    return Facts(reductions=Reductions(**reductions), **defaults | values)


def state(variables):
    """The state of a script without metrics."""
    return State(
        variables=variables,
        learning_rates={"sgd": 0.1},
        metric_states=[],
        metrics={},
        metrics_of_ranks=None,
    )


def evidence_of(facts_by_rank, reference_by_rank, *, size=0.1, ratio=1.3):
    value = np.ones(2)
    variables = [{"w": value}, {"w": digest(value)}]
    return Evidence(
        difference=Difference(step=1, name="w", size=size, scale=1.0, ratio=ratio),
        facts_by_rank=facts_by_rank,
        reference_by_rank=reference_by_rank,
        samples=Samples(
            sizes=[8, 8],
            number=16,
            shared=0.0,
            has_equal_batches=False,
            has_unequal_orders=False,
            is_distinct=True,
        ),
        states_by_rank=list(map(state, variables)),
    )


def reasons(*facts_by_rank, gradients_by_rank=({"w": 1.0}, {"w": 1.0}), ratio=1.3):
    reference_by_rank = [facts(gradients=each) for each in gradients_by_rank]
    facts_by_rank = facts_by_rank if len(facts_by_rank) > 1 else 2 * facts_by_rank
    return causes.find(evidence_of(facts_by_rank, reference_by_rank, ratio=ratio))


def test_a_script_without_a_known_fault_has_no_reason():
    assert not reasons(facts())


@pytest.mark.parametrize(
    ("facts_by_rank", "expected"),
    [
        ([facts(reductions={"kinds": [], "names": set()})], "No gradient is reduced"),
        ([facts(trained=["w", "v"])], "The gradients of v are not reduced"),
        ([facts(unreduced=["adam_1"])], "of the optimizer adam_1 are not reduced"),
        ([facts(reductions={"is_clipped": True})], "clips gradients before they are"),
        (
            [facts(untrained={"v": "1"}), facts(untrained={"v": "2"})],
            "v is not trained, and not equal on all ranks: broadcast model.variables",
        ),
        (
            [facts(untrained={"v": n}, made_untrained=["v"]) for n in "12"],
            "Reduce by hvd.allreduce what the layer adds to it in its call",
        ),
    ],
)
def test_a_reason_that_is_recorded(facts_by_rank, expected):
    (found,) = reasons(*facts_by_rank)
    assert expected in found


@pytest.mark.parametrize(
    "reductions",
    [
        # The script may have reduced the other gradient.
        {"is_by_script": True},
        # A source of another name may be the other variable.
        {"names": {"w", "v:0"}},
    ],
)
def test_gradients_that_may_be_reduced_are_no_reason(reductions):
    found = reasons(facts(trained=["w", "v"], reductions=reductions))
    assert not any("are not reduced" in text for text in found)


@pytest.mark.parametrize("ratio", [2.0, 0.5, 4.0, 0.25])
def test_multiples_of_two_ranks_and_their_squares(ratio):
    (found,) = reasons(facts(), ratio=ratio)
    assert "multiplied or divided by the number of ranks" in found


def test_a_sum_of_the_script_is_a_multiple_of_the_mean():
    summed = facts(reductions={"is_by_script": True, "has_sums": True})
    assert "hvd.Sum, which is 2 times their mean" in reasons(summed, ratio=2.0)[0]
    assert "calls hvd.allreduce itself" in reasons(summed)[0]


@pytest.mark.parametrize(
    ("size", "norm", "is_small"),
    [(9e-5, 1.0, True), (2e-3, 1.0, False), (2e-3, 1e-6, True)],
)
def test_a_difference_that_may_be_rounding(size, norm, is_small):
    evidence = evidence_of(
        2 * [facts()], [facts(gradients={"w": norm, "v": 1.0})], size=size
    )
    assert evidence.is_small == is_small


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (("0.5", "1.5"), "a constant of the step (mul/x) is 0.5 and 1.5"),
        (("0.5", "0.5"), "reads hvd.rank(), a number that is not equal on all"),
    ],
)
def test_a_constant_that_differs_by_rank(values, expected):
    by_rank = [facts(reductions={"constants": {"mul/x": value}}) for value in values]
    (found,) = reasons(*by_rank, gradients_by_rank=({"w": 1.0}, {"w": 3.0}))
    assert expected in found
    assert not reasons(*by_rank)


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ({"w": 2.0, "v": 4.0}, 2),
        ({"w": 0.5, "v": 1.0}, 0.5),
        ({"w": 1.0, "v": 2.0}, 1),
        # One of them twice as large: no multiple of the loss.
        ({"w": 2.0, "v": 2.0}, 1),
        # A penalty, which has no factor, is most of the gradient of one.
        ({"w": 2.0, "v": 2.1, "u": 2.0}, 2),
        # Rounding.
        ({"w": 1.0, "v": 2.0, "b": 5e-9}, 1),
    ],
)
def test_the_factor_of_the_number_of_ranks(reference, expected):
    alone = {"w": 1.0, "v": 2.0, "u": 1.0, "b": 2e-9}
    assert factor_of_size(reference, alone, size=2) == expected


@pytest.mark.parametrize(
    ("dtype", "norms", "is_equal"),
    [
        ("float64", (2e-17, 3e-17), True),
        # Zero in one of them only.
        ("float64", (1e-3, 3e-17), False),
        ("float32", (2e-17, 3e-17), False),
    ],
)
def test_full_steps_of_rounding(dtype, norms, is_equal, tmp_path):
    directories = Directory(tmp_path, "ranks"), Directory(tmp_path, "reference")
    for directory, norm, sign in zip(directories, norms, (1, -1), strict=True):
        start = {"w": np.zeros(1, dtype), "b": np.zeros(1, dtype)}
        directory.write("start", 0, 0, value=start)
        directory.write("facts", 0, value=facts(gradients={"w": 1.0, "b": norm}))
        values = {"w": np.full(1, 0.1, dtype), "b": np.full(1, sign * 0.1, dtype)}
        directory.write("state", 0, 1, value=state(values))
    compared = comparison.compare(*directories)
    assert (compared.first is None) == is_equal


def test_gradients_that_differ_by_rank():
    assert not differ_by_rank([{"w": 1.0, "b": 1e-9}, {"w": 1.00001, "b": 2e-9}])
    assert differ_by_rank([{"w": 1.0}, {"w": 1.0}, {"w": 1.1}])


@pytest.mark.parametrize(
    ("function", "right", "wrong", "expected"),
    [
        (
            rank_values.unequal_class_weights,
            [facts(class_weights="0: 1"), facts(class_weights="0: 1")],
            [facts(class_weights="0: 1"), facts(class_weights="")],
            "class_weight differs by rank: 0: 1 and no weights.",
        ),
        (
            rank_values.equal_seeds,
            [facts(seeds={"dropout": 1}), facts(seeds={"dropout": 2})],
            [facts(seeds={"noise": rank, "dropout": 1}) for rank in range(2)],
            "The seeds of dropout are equal on several ranks",
        ),
        (
            rank_values.unequal_learned,
            # A rank may have a layer alone.
            [facts(learned={"the mean of the layer a": "1"}), facts()],
            [facts(learned={"the mean of the layer a": each}) for each in "12"],
            "The ranks differ in the mean of the layer a",
        ),
        (
            rank_values.unequal_monitored,
            # Rank 1 has ended after the first epoch.
            [{"loss": [0.5, 0.4]}, {"loss": [0.5]}],
            [{"loss": [0.5, 0.4]}, {"loss": [0.5, 0.3]}],
            "loss, by which a callback decides, differs by rank: 0.4 and 0.3.",
        ),
        (
            rank_values.common_files,
            [{"a.txt"}, {"b.txt"}, set()],
            [{"a.txt", "b.txt"}, set(), {"b.txt"}],
            "Several ranks write b.txt",
        ),
    ],
)
def test_values_of_the_ranks(function, right, wrong, expected):
    assert function(right) == ""
    assert function(wrong).startswith(expected)


def test_a_rank_without_a_step_has_no_values(tmp_path):
    verification = Verification(
        command=["train.py"],
        directory=tmp_path,
        root=tmp_path,
        size=3,
        steps=10,
        dtype=None,
    )
    for rank in (0, 2):
        value = facts(seeds={"dropout": rank}, untrained={"v": str(rank)})
        for phase in ("ranks", "reference"):
            verification.files(phase).write("facts", rank, value=value)
        value = state({"w": np.ones(1) if rank == 0 else digest(np.ones(1))})
        verification.files("ranks").write("state", rank, 1, value=value)
    assert not verification.faults_of_ranks(are_steps_equal=True)
    difference = Difference(step=1, name="w", size=0.1, scale=1.0, ratio=1.3)
    reasons = causes.find(verification.evidence(difference))
    assert "v is not trained, and not equal on all ranks" in reasons[0]


class Stopping(keras.callbacks.EarlyStopping):
    """A class of a user."""

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch=epoch, logs=logs)


class Finish(keras.callbacks.Callback):
    """Ends the script after two batches, as a recorder does after its last step."""

    def on_train_batch_end(self, batch, logs=None):
        assert batch < 2
        if batch == 1:
            raise FinishedError


def test_an_epoch_ends_with_a_decision_after_the_last_step(tmp_path, monkeypatch):
    for owner, name in (
        (keras.Model, "fit"),
        (keras.callbacks.CallbackList, "on_train_batch_end"),
        (keras.callbacks.CallbackList, "on_test_batch_end"),
        (keras.callbacks.CallbackList, "on_epoch_end"),
        (keras.callbacks.EarlyStopping, "on_epoch_end"),
        (keras.callbacks.ReduceLROnPlateau, "on_epoch_end"),
    ):
        # Restored after the test.
        monkeypatch.setattr(owner, name, getattr(owner, name))
    files = Directory(tmp_path, "ranks")
    note_decisions(Decisions(files, rank=0))
    layer = keras.layers.Dense(1, kernel_initializer="zeros", trainable=False)
    model = keras.Sequential([keras.Input((1,)), layer])
    model.compile("sgd", "mse", run_eagerly=True)
    x = np.arange(60.0)[:, None]
    options = {"batch_size": 2, "validation_data": (x, x), "verbose": 0}
    with pytest.raises(FinishedError):
        model.fit(x[:8], x[:8], callbacks=[Finish()], **options)
    assert files.read("monitored", 0) is None
    with pytest.raises(FinishedError):
        model.fit(x[:8], x[:8], callbacks=[Finish(), Stopping("val_loss")], **options)
    # Ten batches of the validation, whose predictions are zero.
    expected = np.mean(x[:20] ** 2)
    assert files.read("monitored", 0) == {"val_loss": [pytest.approx(expected)]}


def test_files_that_are_written_anew(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inside").mkdir()
    with noted_files() as written:
        for path, mode in {
            "a.txt": "w",
            "log.txt": "a",
            "b.txt": "xb",
            ".hidden": "w",
            "data.lock": "w",
            "../outside.txt": "w",
        }.items():
            with open(path, mode):
                pass
        os.chdir("inside")
        np.save("c.npy", np.zeros(1))
    np.save("later.npy", np.zeros(1))
    assert written == {"a.txt", "inside/c.npy"}


@pytest.mark.parametrize("wrap", [lambda step: step, tf.function])
@pytest.mark.parametrize(
    ("rows", "is_matched"), [((3, 2), True), ((1, 1), False), ((3, 3), False)]
)
def test_one_process_draws_the_noise_of_all_ranks(
    rows, is_matched, wrap, tmp_path, monkeypatch
):
    for name in ("normal", "truncated_normal", "uniform", "randint"):
        original = getattr(keras.src.backend.random, name)
        monkeypatch.setattr(keras.src.backend.random, name, original)
    plain = keras.src.backend.random.normal

    def draw(number, rank, size, seed):
        """Return the second of two draws of `number` rows, as a rank makes them."""
        monkeypatch.setattr(keras.src.backend.random, "normal", plain)
        names, draws = VariableNames(), Draws()
        files = Directory(tmp_path, "ranks")
        exchange_noise(Noise(files, names, draws, rank=rank, size=size))
        generator = keras.random.SeedGenerator(seed, name="noise")
        names.add(generator.state)

        @wrap
        def step(number):
            return keras.random.normal((number, 2), seed=generator)

        step(tf.constant(number))
        return step(tf.constant(number)).numpy(), draws

    written = [draw(number, rank, 0, rank)[0] for rank, number in enumerate(rows)]
    number = 5 if sum(rows) == 5 else rows[0]
    found, draws = draw(number, 0, 2, 0)
    assert bool(draws.matched) == is_matched
    assert bool(draws.unmatched) != is_matched
    if is_matched:
        np.testing.assert_array_equal(found, np.concatenate(written))
    else:
        # As without a verification.
        np.testing.assert_array_equal(found, written[0])


@pytest.mark.parametrize("wrap", [lambda step: step, tf.function])
def test_the_first_gradients_are_noted_and_divided(wrap, monkeypatch):
    # Restored after the test.
    apply = keras.optimizers.Optimizer.apply
    monkeypatch.setattr(keras.optimizers.Optimizer, "apply", apply)
    names = VariableNames()
    noted = FirstGradients(names, divisor=2.0)
    note_first_gradients(noted)
    weight = keras.Variable(np.zeros(2, "float32"), name="w")
    rows = keras.Variable(np.zeros((3, 1), "float32"), name="rows")
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([weight, rows])

    @wrap
    def step(factor):
        # Row 2 twice.
        slices = tf.IndexedSlices(factor * [[12.0], [5.0]], [2, 2], (3, 1))
        optimizer.apply([factor * [3.0, 4.0], slices], [weight, rows])

    for factor in (1.0, 10.0):
        step(tf.constant(factor))
    assert noted.norms() == {"w": 5.0, "rows": 13.0}
    np.testing.assert_allclose(weight, [-11 * 1.5, -11 * 2])
    np.testing.assert_allclose(rows, [[0], [0], [-11 * 8.5]])


def test_clipped_tensors_are_found_through_elementwise_operations():
    clipped = ClippedTensors()

    @tf.function
    def step(x):
        limited = tf.clip_by_value(x, -1.0, 1.0)
        clipped.add(limited)
        assert clipped.has_any([limited])
        assert clipped.has_any([x, tf.cast(limited, tf.float64) / 2])
        # A clipped loss, or the output of a layer.
        assert not clipped.has_any([x, tf.reduce_sum(limited)])
        return limited

    step(tf.constant([2.0]))
    eager = tf.constant(1.0)
    assert not clipped.has_any([eager])
    clipped.add([eager])
    assert clipped.has_any([eager])


def test_the_numbers_of_a_graph():
    outside = tf.constant([1.0, 2.0])

    @tf.function
    def step(x):
        return x * 0.25 + outside + tf.strings.to_number("3")

    found = constants(step.get_concrete_function(tf.zeros(2)).graph)
    assert sorted(found.values()) == ["0.25", f"array {digest(outside.numpy())}"]
    assert constants(None) == {}


def test_a_shuffle_before_a_shard_is_found():
    data = tf.data.Dataset.range(8)
    first = data.shuffle(8, seed=3).map(lambda x: x).shard(2, 0).batch(2)
    # Without a global seed, TensorFlow has its own for operations with a seed.
    [(_, seed)] = shuffles_before_shard(first)
    assert seed == 3
    assert not shuffles_before_shard(data.shard(2, 0).shuffle(8).batch(2))
    # A job of one rank.
    assert not shuffles_before_shard(data.shuffle(8).shard(1, 0))
    both = tf.data.Dataset.zip(data, data.shuffle(8, seed=1)).shard(2, 0).shuffle(8)
    assert len(shuffles_before_shard(both)) == 1


def test_operations_without_a_seed_are_seeded(monkeypatch):
    monkeypatch.setattr(random_seed, "get_seed", random_seed.get_seed)
    # Another test has set the global seed, which all operations then have.
    monkeypatch.setattr(context.context(), "_seed", None)
    with_seed = tf.compat.v1.get_seed(5)
    capture.seed_operations(11)
    assert random_seed.get_seed(None) == (11, 1)
    assert random_seed.get_seed(None) == (11, 2)
    # As in a job, in which these are equal on all ranks.
    assert random_seed.get_seed(5) == with_seed


def test_one_process_takes_the_first_batch_of_all_ranks_and_goes_on(tmp_path):
    files = Directory(tmp_path, "ranks")
    for rank in range(2):
        files.write("training", rank, 0, value=True)
        for number in range(2):
            batch = [np.array([100 * rank + number, 7])]
            files.write("batch", rank, 0, number, value=batch)
    data = tf.data.Dataset.range(6).batch(2, drop_remainder=True)
    iterate = tf.data.Dataset.__iter__
    whole = BatchReplacer(files, rank=0, size=2)
    read = [batch.numpy().tolist() for batch in whole.iterate(data, iterate)]
    assert read == [[0, 7, 100, 7], [1, 7, 101, 7]]
    first = BatchReplacer(files, rank=0, size=2, is_whole=False)
    read = [batch.numpy().tolist() for batch in first.iterate(data, iterate)]
    assert read == [[0, 7, 100, 7], [2, 3], [4, 5]]
    # The next stream.
    assert [len(batch) for batch in first.iterate(data, iterate)] == [2, 2, 2]


def test_one_process_takes_the_first_call_of_all_ranks(tmp_path):
    files = Directory(tmp_path, "ranks")
    for rank in range(2):
        files.write("call", rank, 0, value=[np.array([rank])])
        files.write("call", rank, 1, value=[np.array([rank])])
    first = BatchReplacer(files, rank=0, size=2, is_whole=False)
    batches = [first.exchange_arguments((np.array([5]),)) for _ in range(2)]
    assert [batch[0].tolist() for batch in batches] == [[0, 1], [5]]


class Largest(keras.metrics.Metric):
    """A metric whose state is no sum."""

    def __init__(self):
        super().__init__(name="largest")
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        largest = keras.ops.max(keras.ops.abs(y_pred))
        self.value.assign(keras.ops.maximum(self.value, largest))

    def result(self):
        return self.value


def test_facts_of_a_script(tmp_path):
    """The metrics beside one that is left out are compared."""
    # A script may take the moments of the first layer alone.
    apart, used = (keras.layers.Normalization(name=name) for name in ("apart", "used"))
    for layer in (apart, used):
        layer.adapt(np.arange(3.0)[:, None])
    used(np.ones((1, 1)))
    layers = [
        keras.Input((4, 2)),
        keras.layers.SpatialDropout1D(0.1, name="channels"),
        keras.layers.Dropout(0.0, name="none"),
        keras.layers.LSTM(2, dropout=0.2, name="lstm"),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse", metrics=[Largest(), "mae"])
    recorder = StepRecorder(
        Directory(tmp_path, "ranks"), rank=0, steps=9, on_steps=lambda steps: None
    )
    recorder.add(model.optimizer)
    for variable in model.variables:
        recorder.names.add(variable)
    model.train_on_batch(np.ones((2, 4, 2)), np.ones((2, 1)))
    recorder.record()
    files = Directory(tmp_path, "ranks")
    learned = " ".join(files.read("facts", 0).learned)
    assert "the layer used" in learned
    assert "the layer apart" not in learned
    named = files.read("facts", 0).left_out
    assert "the metric largest, whose state is not known to be a sum" in named
    # Models of other tests may be there, with layers of their own.
    (dropout,) = (text for text in named if text.startswith("dropout"))
    assert {"channels", "lstm"} <= {*dropout[9:-1].split(", ")}
    assert "none" not in dropout
    assert "mae" in files.read("state", 0, 1).metrics


def test_layers_of_augmentation_return_their_inputs(monkeypatch):
    flip = keras.layers.RandomFlip("vertical", seed=1)
    monkeypatch.setattr(_class_with_call(flip), "call", _class_with_call(flip).call)
    images = np.arange(64.0).reshape((4, 4, 4, 1))
    assert not np.array_equal(flip(images, training=True), images)
    left_out.leave_out_augmentation()
    np.testing.assert_array_equal(flip(images, training=True), images)
    assert list(left_out.left_out_layers([flip])) == ["augmentation (random_flip)"]


def _class_with_call(layer):
    return next(cls for cls in type(layer).__mro__ if "call" in vars(cls))
