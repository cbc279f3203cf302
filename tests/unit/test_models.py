"""The models: shapes, dtypes and number of weights."""

import keras
import numpy as np
import pytest

from hvdtrain.benchmark import networks
from hvdtrain.job import JobError
from hvdtrain.mnist import models


@pytest.mark.parametrize(("name", "weights"), [("mlp", 101_770), ("cnn", 1_199_882)])
def test_weights_on_mnist(name, weights):
    # 784 * 128 + 128 + 128 * 10 + 10; and for the cnn 320 + 18,496 + 9,216 * 128 + 128
    # + 1,290.
    model = models.BY_NAME[name]((28, 28, 1), num_classes=10)
    assert model.count_params() == weights


@pytest.mark.parametrize("name", ["mlp", "cnn"])
@pytest.mark.parametrize("shape", [(28, 28, 1), (32, 20, 3), (6, 6, 2)])
def test_other_images_and_classes(name, shape):
    model = models.BY_NAME[name](shape, num_classes=3)
    images = np.random.RandomState(0).randint(256, size=(5, *shape))
    logits = model(images.astype("uint8"))
    assert logits.shape == (5, 3)
    assert logits.dtype == "float32"
    # Of 0 to 255, in any type; the first layer scales them.
    np.testing.assert_array_equal(logits, model(images.astype("float32")))
    scaled = model.layers[0](images)
    np.testing.assert_allclose(scaled, images / 255, rtol=1e-6)


def test_weights_of_the_synthetic_workloads():
    # 896 + 18,496 + 36,928 + 1,024 * 64 + 64 + 650.
    assert networks.small_cnn((32, 32, 3), num_classes=10).count_params() == 122_570
    model = networks.resnet18((224, 224, 3), num_classes=1000)
    # As published, with the moving averages of batch normalization beside them.
    weights = sum(weight.numpy().size for weight in model.trainable_weights)
    assert weights == 11_689_512
    assert model.output_shape == (None, 1000)


def test_images_too_small_for_the_cnn():
    with pytest.raises(JobError, match=r"5x28.*6x6"):
        models.cnn((5, 28, 1), num_classes=10)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_logits_stay_float32_under_mixed_precision(policy):
    keras.mixed_precision.set_global_policy(policy)
    try:
        model = models.cnn((28, 28, 1), num_classes=10)
        assert model(np.zeros((1, 28, 28, 1), "float32")).dtype == "float32"
    finally:
        keras.mixed_precision.set_global_policy("float32")
