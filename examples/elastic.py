r"""Train on ranks that may be lost or added while the job runs.

    echo localhost:2 >hosts
    horovodrun --gloo -np 2 --min-np 1 --max-np 4 \
        --host-discovery-script "cat hosts" python examples/elastic.py

Prints a test accuracy of 0.95 within 20 s on two cores. The launcher calls the script
every second, and starts ranks on hosts that are new in its output. When a host is lost,
the other ranks continue from the last commit.
"""

import keras
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain import data

EPOCHS = 10
BATCH_SIZE = 32

hvd.init()
keras.utils.set_random_seed(1)
digits = data.load("digits")
model = keras.Sequential(
    [
        keras.Input(digits.image_shape),
        keras.layers.Rescaling(1 / 255),
        keras.layers.Flatten(),
        keras.layers.Dense(128, "relu"),
        keras.layers.Dense(10),
    ]
)
# When the number of ranks changes, the state multiplies the learning rate.
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size()))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer, loss, metrics=["accuracy"])


# It is called again after each change of the ranks, and is the first to call a
# collective: a rank that joins later begins here as well.
@hvd.elastic.run
def train(state):
    """Train from the epoch and batch of the last commit to the end."""
    x, y = (a[hvd.rank() :: hvd.size()] for a in (digits.x_train, digits.y_train))
    batches = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)).repeat()
    state.model.fit(
        batches.batch(BATCH_SIZE),
        steps_per_epoch=len(digits.x_train) // BATCH_SIZE // hvd.size(),
        epochs=EPOCHS - state.epoch,
        callbacks=[
            hvd.callbacks.MetricAverageCallback(),
            hvd.elastic.CommitStateCallback(state, batches_per_commit=10),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
        ],
        shuffle=False,
        verbose=2 if hvd.rank() == 0 else 0,
    )


state = hvd.elastic.KerasState(model, batch=0, epoch=0)
train(state)
if hvd.rank() == 0:
    _, accuracy = model.evaluate(digits.x_test, digits.y_test, verbose=0)
    print(f"test accuracy {accuracy:.4f} on {hvd.size()} ranks at the end")
