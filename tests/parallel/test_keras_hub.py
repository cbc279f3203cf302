"""Models of keras-hub on N ranks take the steps of one process with the N-times batch.

From constructor arguments: nothing is downloaded. `scripts/test.sh hub` runs this file.
"""

import keras
import numpy as np
import oracle
import pytest

import hvdtrain.keras as hvd

keras_hub = pytest.importorskip("keras_hub")

STEPS = 3
TOLERANCE = 3e-7
LENGTH = 6
VOCABULARY = 16
SIZES = {"num_layers": 1, "hidden_dim": 8, "intermediate_dim": 16}
RNG = np.random.default_rng(0)
COUNT = STEPS * oracle.LOCAL_BATCH_SIZE * hvd.size()
TOKENS = RNG.integers(1, VOCABULARY, (COUNT, LENGTH))
LABELS = RNG.integers(0, oracle.CLASSES, COUNT)
IMAGES = RNG.normal(size=(COUNT, 8, 8, 3)).astype("float32")
MASK = {"padding_mask": np.ones_like(TOKENS)}
TEXT = {"token_ids": TOKENS, **MASK}


def classifier(backbone, features):
    return keras.Model(backbone.input, keras.layers.Dense(oracle.CLASSES)(features))


def language_model(backbone):
    logits = backbone.token_embedding(backbone.output, reverse=True)
    return keras.Model(backbone.input, logits)


def bert():
    backbone = keras_hub.models.BertBackbone(
        VOCABULARY, num_heads=2, dropout=0.0, max_sequence_length=LENGTH, **SIZES
    )
    return classifier(backbone, backbone.output["pooled_output"])


def gpt2(lora=False):
    backbone = keras_hub.models.GPT2Backbone(
        VOCABULARY, num_heads=2, dropout=0.0, max_sequence_length=LENGTH, **SIZES
    )
    if lora:
        backbone.enable_lora(2)
    return language_model(backbone)


def gpt2_with_lora():
    return gpt2(lora=True)


def llama():
    return language_model(
        keras_hub.models.LlamaBackbone(
            VOCABULARY, num_query_heads=2, num_key_value_heads=1, **SIZES
        )
    )


def vit():
    backbone = keras_hub.models.ViTBackbone(
        (8, 8, 3),
        patch_size=(4, 4),
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        mlp_dim=16,
    )
    return classifier(backbone, backbone.output[:, 0])


SAMPLES = {
    bert: (TEXT | {"segment_ids": np.zeros_like(TOKENS)}, LABELS),
    gpt2: (TEXT, np.roll(TOKENS, -1, axis=1)),
    gpt2_with_lora: (TEXT, np.roll(TOKENS, -1, axis=1)),
    llama: (TEXT, np.roll(TOKENS, -1, axis=1)),
    vit: (IMAGES, LABELS),
}
OPTIMIZERS = {
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "muon": lambda: keras.optimizers.Muon(0.01),
}


CASES = [
    *((make, "adamw") for make in SAMPLES),
    *((make, "sgd") for make in (llama, vit)),
    *((make, "muon") for make in (gpt2, vit)),
]


def is_determined(path):
    """Return whether the gradient of a weight is more than rounding errors.

    The bias of a key adds one number to all scores of a query, and softmax ignores it:
    its gradient is zero. Optimizers that divide by the size of a gradient turn rounding
    errors into steps. Muon does most, since it takes this bias for a matrix: on one
    process that sums a batch in another order, the bias changes by up to 1e-2, with
    AdamW by 2e-4. With float64, these are 4e-9 and 3e-13. All other weights change by
    1.5e-7 or less.
    """
    return not path.endswith("key/bias")


def train(make_model, optimizer, inputs, targets, batch_size):
    """Return the determined weights before and after an epoch."""
    keras.utils.set_random_seed(7)
    model = make_model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    weights = [v for v in model.weights if is_determined(v.path)]
    before = [v.numpy() for v in weights]
    oracle.build_optimizer(model)
    oracle.fit(model, inputs, targets, batch_size)
    return before, [v.numpy() for v in weights]


def train_shard(make_model, optimizer):
    inputs, targets = SAMPLES[make_model]
    if isinstance(inputs, dict):
        part = {name: oracle.shard(array) for name, array in inputs.items()}
    else:
        part = oracle.shard(inputs)
    return train(
        make_model, optimizer, part, oracle.shard(targets), oracle.LOCAL_BATCH_SIZE
    )


def train_big_batch(make_model, optimizer):
    """Return the weights after an epoch of one process, on all ranks."""
    batch_size = oracle.LOCAL_BATCH_SIZE * hvd.size()

    def run():
        return train(make_model, optimizer, *SAMPLES[make_model], batch_size)[1]

    return oracle.on_one_process(run)


@pytest.mark.parametrize(
    ("make_model", "name"), CASES, ids=[f"{make.__name__}-{n}" for make, n in CASES]
)
def test_fit_equals_the_big_batch(make_model, name):
    make = OPTIMIZERS[name]
    # All samples look up the same positions, and one process sums the gradients of a
    # batch before it: each row occurs once. Rows of several ranks must be added up as
    # well, since Keras' Adam does not.
    optimizer = hvd.DistributedOptimizer(make(), sparse_as_dense=make_model is vit)
    before, weights = train_shard(make_model, optimizer)
    expected = train_big_batch(make_model, make())
    assert oracle.difference(weights, expected) <= TOLERANCE
    assert oracle.difference(weights, before) > 1e-3
    oracle.assert_bitwise_equal_over_ranks(weights)


def test_the_oracle_sees_a_missing_reduction():
    make = OPTIMIZERS["sgd"]
    _, weights = train_shard(gpt2, make())
    assert oracle.difference(weights, train_big_batch(gpt2, make())) > 1e-3
