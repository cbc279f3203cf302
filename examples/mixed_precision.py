"""Train in float16 with a loss scale that is the same on all ranks.

    horovodrun -np 2 python examples/mixed_precision.py

Prints a test accuracy of 0.96 within 40 s on two cores. On CPUs the example shows the
result, and not the speed.
"""

import keras

import hvdtrain.keras as hvd
from hvdtrain import data

hvd.init()
keras.utils.set_random_seed(1)
# Weights stay in float32, and layers compute in float16. "mixed_bfloat16" has the range
# of float32, and needs no loss scale.
keras.mixed_precision.set_global_policy("mixed_float16")

digits = data.load("digits")
shard = slice(hvd.rank(), len(digits.x_train) // hvd.size() * hvd.size(), hvd.size())
model = keras.Sequential(
    [
        keras.Input(digits.image_shape),
        keras.layers.Rescaling(1 / 255),
        keras.layers.Flatten(),
        keras.layers.Dense(128, "relu"),
        # In float32: the softmax of the loss needs its precision.
        keras.layers.Dense(10, dtype="float32"),
    ]
)
# `compile` puts a LossScaleOptimizer around this one. When the gradients of one rank
# overflow, all ranks skip the step and lower the scale.
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size()))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer, loss, metrics=["accuracy"])
model.fit(
    digits.x_train[shard],
    digits.y_train[shard],
    batch_size=32,
    epochs=10,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ],
    verbose=2 if hvd.rank() == 0 else 0,
)
if hvd.rank() == 0:
    _, accuracy = model.evaluate(digits.x_test, digits.y_test, verbose=0)
    scale = float(model.optimizer.dynamic_scale)
    print(f"test accuracy {accuracy:.4f}, loss scale {scale:.0f}")
