"""Train a model whose layers are on two ranks: a pipeline of two stages.

    horovodrun -np 2 python examples/pipeline.py

Prints a test accuracy of 0.95. With `-np 4`, two replicas of
two ranks each take half of the samples each.
"""

from hvdtrain import job
from hvdtrain.job.world import MeshShape

world = job.start(seed=1, mesh=MeshShape(pipeline=2))
# After job.start, which sets what TensorFlow and Horovod read at their import.
import keras

import hvdtrain.keras as hvd
from hvdtrain import data, parallel


def build_full_model():
    """Return the model with all layers, of which each rank keeps its stage."""
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Flatten(),
            keras.layers.Dense(256, "relu", name="first"),
            keras.layers.Dense(256, "relu", name="second"),
            keras.layers.Dense(10),
        ]
    )


with parallel.Mesh(pipeline=2) as mesh:
    # The second stage begins with the layer "second". Each batch passes the stages in
    # eight micro-batches.
    model = parallel.PipelineModel(
        build_full_model, stages=["second"], microbatches=8, schedule="1f1b"
    )
model.compile(
    hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * mesh.data.size), mesh=mesh),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
digits = data.load("digits")
# The ranks of a replica have the same mesh.data.index, and read the same samples.
count = len(digits.x_train) // mesh.data.size * mesh.data.size
shard = slice(mesh.data.index, count, mesh.data.size)
model.fit(
    digits.x_train[shard],
    digits.y_train[shard],
    batch_size=64,
    epochs=10,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ],
    # In one order on all ranks of a replica.
    shuffle=False,
    verbose=2 if world.is_chief else 0,
)
# All ranks call it, since each has one stage.
_, accuracy = model.evaluate(digits.x_test, digits.y_test, batch_size=100, verbose=0)
if world.is_chief:
    print(f"{model.count_params():,} of the weights are on rank 0")
    print(f"test accuracy {accuracy:.4f}")
