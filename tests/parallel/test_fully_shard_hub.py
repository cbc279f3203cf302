"""Fully sharded models of keras-hub take the steps of one process, in float64.

From constructor arguments: nothing is downloaded. `scripts/test.sh hub` runs this file.
"""

import keras
import numpy as np
import pytest
import stepping
import zoo

import hvdtrain.distribution
import hvdtrain.keras as hvd
from hvdtrain import parallel
from hvdtrain.parallel.gathering import find_sharded

keras_hub = pytest.importorskip("keras_hub")
pytestmark = pytest.mark.usefixtures("float64")

LENGTH = 5
VOCABULARY = 16
SIZES = {
    "vocabulary_size": VOCABULARY,
    "num_layers": 2,
    "hidden_dim": 8,
    "intermediate_dim": 16,
}
TOKENS = np.random.default_rng(0).integers(1, VOCABULARY, (zoo.COUNT, LENGTH))
TEXT = {"token_ids": TOKENS, "padding_mask": np.ones_like(TOKENS)}
TEXT["padding_mask"][:, -1] = 0
SEGMENTS = {"segment_ids": np.zeros_like(TOKENS)}


def language_model(kind, backbone):
    return kind(backbone=backbone, preprocessor=None, dtype="float64")


def gpt2():
    backbone = keras_hub.models.GPT2Backbone(
        num_heads=2, dropout=0.0, max_sequence_length=LENGTH, **SIZES
    )
    return language_model(keras_hub.models.GPT2CausalLM, backbone)


def llama():
    backbone = keras_hub.models.LlamaBackbone(
        num_query_heads=2, num_key_value_heads=1, **SIZES
    )
    return language_model(keras_hub.models.LlamaCausalLM, backbone)


def gemma():
    # Its layout map shards the heads of keys.
    backbone = keras_hub.models.GemmaBackbone(
        num_query_heads=2, num_key_value_heads=2, head_dim=4, **SIZES
    )
    return language_model(keras_hub.models.GemmaCausalLM, backbone)


def bert():
    backbone = keras_hub.models.BertBackbone(
        num_heads=2, dropout=0.0, max_sequence_length=LENGTH, **SIZES
    )
    return keras_hub.models.BertTextClassifier(
        backbone, num_classes=zoo.CLASSES, preprocessor=None, dropout=0.0
    )


LANGUAGE = (gpt2, llama, gemma)
zoo.SAMPLES.update({**dict.fromkeys(LANGUAGE, TEXT), bert: TEXT | SEGMENTS})
zoo.TARGETS.update(dict.fromkeys(LANGUAGE, np.roll(TOKENS, -1, axis=1)))
# Their normalizations compute in float32, whatever the dtype of the model is.
TOLERANCES = {llama: 1e-7, gemma: 1e-6}


@pytest.mark.parametrize("make_model", [*LANGUAGE, bert])
def test_steps_equal_one_process(make_model):
    batches = stepping.global_batches(make_model)[:2]
    optimizers = [keras.optimizers.Adam(0.01, epsilon=1e-3) for _ in range(2)]
    expected = stepping.compile_with(stepping.build(make_model), optimizers[0])
    model = stepping.build(make_model)
    parallel.fully_shard(model, min_size=16)
    assert len(find_sharded(model.weights)) > 5
    stepping.compile_with(model, hvd.DistributedOptimizer(optimizers[1]))
    inputs, _ = batches[0]
    np.testing.assert_allclose(model(inputs), expected(inputs), rtol=0, atol=1e-12)
    stepping.train_plainly(expected, batches)
    for batch in batches:
        model.train_on_batch(*stepping.dealt(batch))
    tolerance = TOLERANCES.get(make_model, 1e-10)
    stepping.assert_close(model, stepping.values(expected), tolerance)


def layouts(make_model, mesh):
    """The layout map of a model's class; for those without one, of the same kind."""
    backbones = keras_hub.models
    if make_model is llama:
        return backbones.LlamaBackbone.get_layout_map(mesh)
    if make_model is gemma:
        return backbones.GemmaBackbone.get_layout_map(mesh)
    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map["token_embedding/embeddings"] = ("model", "batch")
    layout_map[".*(query|key|value)/kernel"] = (None, "model", None)
    layout_map[".*attention_output/kernel"] = ("model", None, "batch")
    layout_map[".*feedforward_intermediate_dense/kernel"] = ("batch", "model")
    layout_map[".*feedforward_output_dense/kernel"] = ("model", "batch")
    return layout_map


@pytest.mark.parametrize("make_model", [*LANGUAGE, bert])
def test_steps_with_layout_maps_equal_one_process(make_model):
    hvdtrain.distribution.enable()
    keras.distribution.initialize()
    batches = stepping.global_batches(make_model)[:2]
    optimizers = [keras.optimizers.Adam(0.01, epsilon=1e-3) for _ in range(2)]
    expected = stepping.compile_with(stepping.build(make_model), optimizers[0])
    mesh = keras.distribution.DeviceMesh(
        (1, hvd.size()), ["batch", "model"], keras.distribution.list_devices()
    )
    layout_map = layouts(make_model, mesh)
    with keras.distribution.ModelParallel(layout_map=layout_map).scope():
        model = stepping.build(make_model)
        stepping.compile_with(model, optimizers[1])
        assert len(find_sharded(model.weights)) > 10
        inputs, _ = batches[0]
        np.testing.assert_allclose(model(inputs), expected(inputs), rtol=0, atol=1e-12)
        stepping.train_plainly(expected, batches)
        for batch in batches:
            model.train_on_batch(*batch)
    tolerance = TOLERANCES.get(make_model, 1e-10)
    stepping.assert_close(model, stepping.values(expected), tolerance)
