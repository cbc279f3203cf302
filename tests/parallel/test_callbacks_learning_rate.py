"""One callback of the learning rate serves several `fit`s."""

import keras
import numpy as np
import pytest

import hvdtrain.keras as hvd


class Rates(keras.callbacks.Callback):
    """Notes the rate of every step."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(float(self.model.optimizer.learning_rate.numpy()))


def test_the_steps_of_an_epoch_are_those_of_each_fit():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.8, warmup_epochs=1)
    for steps in (4, 2):
        rates = Rates()
        data = np.zeros((steps, 1), "float32")
        model.fit(data, data, batch_size=1, verbose=0, callbacks=[warmup, rates])
        # 0.8 * (1 + (size - 1) * s / steps) / size in step s.
        expected = [
            0.8 * (1 + (hvd.size() - 1) * step / steps) / hvd.size()
            for step in range(1, steps + 1)
        ]
        assert rates.seen == pytest.approx(expected)
