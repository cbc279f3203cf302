"""No rank stops alone; rank 0 alone writes the best model."""

import copy

import keras
import meshes
import numpy as np
import oracle
import pytest
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain import parallel, training
from hvdtrain.job import World

STEPS = 10


class StopAt(keras.callbacks.Callback):
    """One rank wants to stop after a batch of the first epoch."""

    def __init__(self, batch, rank):
        super().__init__()
        self.batch, self.rank = batch, rank
        self.last_batch = None

    def on_train_batch_end(self, batch, logs=None):
        self.last_batch = batch
        if batch == self.batch and hvd.rank() == self.rank:
            self.model.stop_training = True


class Wishes(keras.callbacks.Callback):
    """Notes the first batch after which a callback before it wants to stop."""

    first_batch = None

    def on_train_batch_end(self, batch, logs=None):
        if self.model.stop_training and self.first_batch is None:
            self.first_batch = batch


def fit(*callbacks, optimizer=None, epochs=3, **fit_args):
    model = oracle.build_model()
    optimizer = optimizer or keras.optimizers.SGD(0.1)
    model.compile(hvd.DistributedOptimizer(optimizer), oracle.LOSS)
    samples = oracle.samples(steps=STEPS)
    options = {"epochs": epochs, "callbacks": callbacks, **fit_args}
    history = oracle.fit_shard(model, *samples, **options)
    return model, history


@pytest.mark.parametrize(
    ("every_steps", "last"),
    [
        (3, 5),
        *(
            pytest.param(*case, marks=pytest.mark.release)
            for case in ((4, 3), (100, 9))
        ),
    ],
)
def test_all_ranks_stop_at_the_next_question(every_steps, last):
    stop = StopAt(3, rank=1)
    model, history = fit(
        stop,
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.StopTogetherCallback(every_steps),
    )
    assert stop.last_batch == last
    assert history.epoch == [0]
    assert model.optimizer.iterations.numpy() == last + 1
    oracle.assert_bitwise_equal_over_ranks(model.get_weights())


def test_a_wish_at_the_end_of_an_epoch():
    early = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: setattr(
            early.model, "stop_training", epoch == 1 and hvd.rank() == 0
        )
    )
    _, history = fit(early, hvd.callbacks.StopTogetherCallback())
    assert history.epoch == [0, 1]


@pytest.mark.release
def test_without_a_wish_training_goes_on():
    together = hvd.callbacks.StopTogetherCallback(2)
    for _ in range(2):
        model, history = fit(together)
        assert history.epoch == [0, 1, 2]
        assert model.optimizer.iterations.numpy() == 3 * STEPS


class Weights(keras.callbacks.Callback):
    """Notes the weights after each epoch."""

    def on_train_begin(self, logs=None):
        self.by_epoch = []

    def on_epoch_end(self, epoch, logs=None):
        self.by_epoch.append(self.model.get_weights())


def restores_first_epoch(patience):
    """With the mode "max" and losses that fall, the first epoch is the best."""
    return keras.callbacks.EarlyStopping(
        "loss", mode="max", patience=patience, restore_best_weights=True
    )


@pytest.mark.parametrize(
    ("rank", "patience", "epochs", "use_ema"),
    [
        pytest.param(0, 2, 3, False, marks=pytest.mark.release),
        pytest.param(1, 2, 3, False, marks=pytest.mark.release),
        pytest.param(1, 9, 4, False, marks=pytest.mark.release),
        (1, 2, 3, True),
    ],
)
def test_weights_that_one_rank_restores_at_the_end(rank, patience, epochs, use_ema):
    notes, together = Weights(), hvd.callbacks.StopTogetherCallback()
    check = hvd.callbacks.ConsistencyCheckCallback()
    restores = [restores_first_epoch(patience)] if hvd.rank() == rank else []
    sgd = keras.optimizers.SGD(0.1, use_ema=use_ema)
    model, history = fit(notes, *restores, together, check, epochs=4, optimizer=sgd)
    assert len(history.epoch) == epochs
    oracle.assert_bitwise_equal_over_ranks(model.get_weights())
    assert oracle.difference(model.get_weights(), notes.by_epoch[0]) == 0


def test_moving_averages_of_weights_that_no_rank_restores():
    notes, sgd = Weights(), keras.optimizers.SGD(0.1, use_ema=True)
    after = Weights()
    model, _ = fit(notes, hvd.callbacks.StopTogetherCallback(), after, optimizer=sgd)
    assert oracle.difference(after.by_epoch[-1], notes.by_epoch[-1]) == 0
    averages = sgd._model_variables_moving_average
    assert oracle.difference(model.get_weights(), [v.numpy() for v in averages]) == 0


def test_weights_that_one_rank_restores_in_train_and_evaluate():
    model, notes = oracle.build_model(), Weights()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), oracle.LOSS)
    restores = [restores_first_epoch(1)] if hvd.rank() == 1 else []
    data = tf.data.Dataset.from_tensor_slices(oracle.samples(steps=STEPS))
    data = data.shard(hvd.size(), hvd.rank()).batch(oracle.LOCAL_BATCH_SIZE)
    result = training.train_and_evaluate(
        lambda: model,
        training.TrainSpec(
            input_fn=lambda start, end: data.skip(start),
            max_steps=STEPS,
            pass_steps=2,
            local_batch_size=oracle.LOCAL_BATCH_SIZE,
            callbacks=lambda plan: [notes, *restores],
        ),
        training.EvalSpec(input_fn=lambda: data),
        world=World(rank=hvd.rank(), size=hvd.size()),
    )
    assert result.step < STEPS
    oracle.assert_bitwise_equal_over_ranks(model.get_weights())
    assert oracle.difference(model.get_weights(), notes.by_epoch[0]) == 0


def test_shards_that_one_rank_restores_are_refused():
    with meshes.all_meshes() as (mesh, *_):
        dense = parallel.ColumnParallelDense(4, mesh=mesh, gather_output=True)
        model = keras.Sequential([keras.Input((oracle.FEATURES,)), dense])
        sgd = keras.optimizers.SGD(0.01)
        model.compile(hvd.DistributedOptimizer(sgd, mesh=mesh), "mse")
        restores = [restores_first_epoch(9)] if hvd.rank() == 1 else []
        inputs, _ = oracle.samples(steps=2)
        with pytest.raises(ValueError, match="Received: changes on rank 1") as error:
            oracle.fit(
                *(model, inputs, inputs[:, :4]),
                epochs=2,
                callbacks=[*restores, hvd.callbacks.StopTogetherCallback()],
            )
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("weight", "every_steps", "steps"),
    [
        pytest.param(np.nan, 1, 3, marks=pytest.mark.release),
        (1e38, 1, 3),
        pytest.param(1e38, 100, STEPS, marks=pytest.mark.release),
    ],
)
def test_a_bad_loss_on_one_rank_stops_all(weight, every_steps, steps):
    # Samples that weigh 1e38 make an infinite loss with finite gradients. Clipped,
    # they do no harm: the other ranks never see anything wrong.
    weights = np.ones(STEPS * oracle.LOCAL_BATCH_SIZE, "float32")
    if hvd.rank() == 1:
        weights[2 * oracle.LOCAL_BATCH_SIZE :][: oracle.LOCAL_BATCH_SIZE] = weight
    wishes = Wishes()
    model, history = fit(
        keras.callbacks.TerminateOnNaN(),
        wishes,
        hvd.callbacks.StopTogetherCallback(every_steps),
        sample_weight=weights,
        optimizer=keras.optimizers.SGD(0.1, clipvalue=0.1),
    )
    assert history.epoch == [0]
    assert model.optimizer.iterations.numpy() == steps
    is_finite = np.isfinite(model.layers[0].get_weights()[0]).all()
    assert is_finite != np.isnan(weight)
    if hvd.rank() == 1:
        assert wishes.first_batch == 2
    elif not np.isnan(weight):  # which spreads by the gradients
        assert wishes.first_batch is None


def test_rank_0_writes_the_best_model(tmp_path):
    path = tmp_path / f"rank{hvd.rank()}" / "best.keras"
    best = hvd.callbacks.BestModelCheckpoint(monitor="loss", filepath=path)
    model, _ = fit(hvd.callbacks.MetricAverageCallback(), best, epochs=1)
    assert path.exists() == (hvd.rank() == 0)
    if hvd.rank() == 0:
        restored = keras.models.load_model(path)
        assert oracle.difference(restored.get_weights(), model.get_weights()) == 0


class FullDisk(keras.layers.Dense):
    is_full = False

    def save_own_variables(self, store):
        super().save_own_variables(store)
        if self.is_full:
            raise OSError("No space left on device")


def test_a_failure_leaves_the_best_model_before(tmp_path):
    if hvd.rank() > 0:
        pytest.skip("rank 0 writes")
    path = tmp_path / "best.keras"
    layer = FullDisk(1)
    model = keras.Sequential([keras.Input((2,)), layer])
    model.compile("sgd", "mse")
    best = hvd.callbacks.BestModelCheckpoint(monitor="loss", filepath=path)
    samples = np.ones((4, 2)), np.ones((4, 1))
    model.fit(*samples, verbose=0, callbacks=[best])
    written = path.read_bytes()
    layer.is_full = True
    with pytest.raises(OSError, match="No space left"):
        model.fit(*samples, verbose=0, callbacks=[best])
    assert [file.name for file in tmp_path.iterdir()] == ["best.keras"]
    assert path.read_bytes() == written


def test_a_callback_can_be_copied(tmp_path):
    best = hvd.callbacks.BestModelCheckpoint(
        monitor="loss", filepath=tmp_path / f"{hvd.rank()}.keras"
    )
    best.set_model(oracle.build_model())
    copied = copy.copy(best)
    assert copied.filepath == best.filepath
    # What stands for the model is copied with it.
    assert copy.copy(best.model).layers == best.model.layers


@pytest.mark.release
def test_a_worse_epoch_is_not_written(tmp_path):
    class Worse(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["val_loss"] = float(epoch)

    best = hvd.callbacks.BestModelCheckpoint(save_weights_only=True)
    best.filepath = str(tmp_path / "{epoch}.weights.h5")
    fit(Worse(), hvd.callbacks.MetricAverageCallback(), best)
    written = [path.name for path in tmp_path.iterdir()]
    assert written == (["1.weights.h5"] if hvd.rank() == 0 else [])


def test_a_checkpoint_needs_a_file():
    with pytest.raises(ValueError, match="no file to write"):
        fit(hvd.callbacks.BestModelCheckpoint())
