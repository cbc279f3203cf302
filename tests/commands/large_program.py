"""Trains a transformer with 300 MB of weights by Adam: replicated or sharded."""

import sys

import keras
import numpy as np

import hvdtrain.keras as hvd
from hvdtrain import parallel

WORDS, WIDTH, BLOCKS, LENGTH = 512, 1024, 6, 16


def block(x):
    attention = keras.layers.MultiHeadAttention(8, WIDTH // 8)
    normalized = keras.layers.LayerNormalization()(x)
    x = x + attention(normalized, normalized, use_causal_mask=True)
    y = keras.layers.Dense(4 * WIDTH, "gelu")(keras.layers.LayerNormalization()(x))
    return x + keras.layers.Dense(WIDTH)(y)


def build():
    keras.utils.set_random_seed(1)
    words = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(WORDS, WIDTH)(words)
    for _ in range(BLOCKS):
        x = block(x)
    return keras.Model(words, keras.layers.Dense(WORDS)(x))


hvd.init()
model = parallel.fully_shard(build) if sys.argv[1] == "sharded" else build()
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3)), loss)
words = np.random.default_rng(hvd.rank()).integers(0, WORDS, (6, LENGTH))
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
model.fit(words, words, batch_size=2, callbacks=callbacks, verbose=0)
print("trained", flush=True)
