"""Train a model whose layers are on two ranks: a pipeline of two stages.

    horovodrun -np 2 python examples/pipeline.py

Prints a test accuracy of 0.95 within 40 s on two cores. With `-np 4` it prints 0.98:
two replicas of two ranks each train on half of the samples, at twice the learning rate.
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


def read_shard(x, y):
    """Return the samples of this replica, as many as every other replica has.

    The ranks of a replica have the same mesh.data.index, and read the same samples.
    """
    count = len(x) // mesh.data.size * mesh.data.size
    shard = slice(mesh.data.index, count, mesh.data.size)
    return x[shard], y[shard]


digits = data.load("digits")
model.fit(
    *read_shard(digits.x_train, digits.y_train),
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
# All ranks call it, since each has one stage. The mean over the replicas also keeps a
# replica that is done in the job: Horovod would end while others still evaluate.
_, accuracy = model.evaluate(*read_shard(digits.x_test, digits.y_test), verbose=0)
accuracy = hvd.allreduce(accuracy)
if world.is_chief:
    print(f"{model.count_params():,} of the weights are on rank 0")
    print(f"test accuracy {accuracy:.4f}")
