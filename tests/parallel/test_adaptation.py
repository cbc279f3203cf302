"""`training.adapt` on all ranks, and Keras' `adapt` in one process."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain import data, training
from hvdtrain.job import JobError, World
from hvdtrain.keras import adapted_state
from hvdtrain.training import adaptation

LAYERS = keras.layers
RANK, SIZE = hvd.rank(), hvd.size()
WORLD = World(rank=RANK, size=SIZE)
RANDOM = np.random.RandomState(0)
SAMPLES = 101
# Many words are equally frequent, and each rank has some that the others lack.
NUMBERS = RANDOM.zipf(1.3, size=(SAMPLES, 3)) % 50
WORDS = NUMBERS.astype(str).astype(object)
SENTENCES = np.array([" ".join([*row, "The", "the."]) for row in WORDS], object)
VALUES = (100 + RANDOM.normal(size=(SAMPLES, 4, 3)) * [1, 5, 9]).astype("float32")


def adapt(layer, samples, **options):
    training.adapt(layer, samples, world=WORLD, local_batch_size=16, **options)
    return layer


def learned(layer):
    """What a lookup layer has learned: the vocabulary, and weights of TF-IDF."""
    lookup = getattr(layer, "_lookup_layer", layer)
    idf = getattr(lookup, "idf_weights_const", None)
    return layer.get_vocabulary(), None if idf is None else idf.numpy().tolist()


LOOKUPS = {
    "strings": (LAYERS.StringLookup, {}, WORDS),
    "scalars": (LAYERS.StringLookup, {}, WORDS[:, 0]),
    "max_tokens": (LAYERS.StringLookup, {"max_tokens": 9}, WORDS),
    "tokens": (
        LAYERS.StringLookup,
        {"mask_token": "1", "oov_token": "2", "num_oov_indices": 2},
        WORDS,
    ),
    "idf": (LAYERS.StringLookup, {"output_mode": "tf_idf"}, WORDS),
    "idf_padded": (
        LAYERS.StringLookup,
        {"output_mode": "tf_idf", "max_tokens": 9, "pad_to_max_tokens": True},
        WORDS,
    ),
    "idf_scalars": (LAYERS.StringLookup, {"output_mode": "tf_idf"}, WORDS[:, 0]),
    "integers": (LAYERS.IntegerLookup, {"max_tokens": 12}, NUMBERS),
    "integers_idf": (LAYERS.IntegerLookup, {"output_mode": "tf_idf"}, NUMBERS),
    "text": (LAYERS.TextVectorization, {"max_tokens": 12}, SENTENCES),
    "ngrams": (LAYERS.TextVectorization, {"ngrams": 2, "max_tokens": 30}, SENTENCES),
    "text_idf": (
        LAYERS.TextVectorization,
        {"ngrams": (1, 3), "output_mode": "tf_idf"},
        SENTENCES[:, None],
    ),
    "characters": (
        LAYERS.TextVectorization,
        {"split": "character", "standardize": None},
        SENTENCES,
    ),
}


AXES = {"last": -1, "none": None, "first": 1, "both": (1, 2)}
BINS = {"values": VALUES, "ties": NUMBERS, "scalars": VALUES[:, 0, 0]}


@functools.cache
def adapted():
    """Layers that one pass has adapted, by the names of their samples."""
    layers, samples = {}, {}
    for name, (make, options, values) in LOOKUPS.items():
        layers[name], samples[name] = make(**options), values
    for name, axis in AXES.items():
        key = f"moments {name}"
        layers[key], samples[key] = LAYERS.Normalization(axis), VALUES
    for name, values in BINS.items():
        key = f"bins {name}"
        layers[key], samples[key] = LAYERS.Discretization(num_bins=7), values
    return adapt(layers, samples)


@pytest.mark.ranks
@pytest.mark.parametrize("name", LOOKUPS)
def test_vocabularies_equal_those_of_one_process(name):
    make, options, samples = LOOKUPS[name]
    expected = make(**options)
    expected.adapt(samples)
    assert len(learned(expected)[0]) > 5
    assert learned(adapted()[name]) == learned(expected)
    share = make(**options)
    share.adapt(samples[RANK::SIZE])
    assert learned(share) != learned(expected)


@pytest.mark.parametrize("name", AXES)
def test_moments_equal_those_of_one_process(name):
    layer, expected = adapted()[f"moments {name}"], LAYERS.Normalization(AXES[name])
    expected.adapt(VALUES.astype("float64"))
    assert layer.adapt_mean.shape == expected.adapt_mean.shape
    for state in ("adapt_mean", "adapt_variance"):
        found, wanted = (getattr(x, state).numpy() for x in (layer, expected))
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
    np.testing.assert_allclose(layer(VALUES), expected(VALUES), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", BINS)
def test_bins_equal_those_of_one_process(name):
    expected = LAYERS.Discretization(num_bins=7)
    expected.adapt(BINS[name])
    assert adapted()[f"bins {name}"].bin_boundaries == expected.bin_boundaries


@pytest.mark.parametrize("epsilon", [0.01, 0.05])
def test_bins_of_more_values_than_are_kept(epsilon, monkeypatch):
    monkeypatch.setattr(adapted_state, "EXACT_VALUES", 1000)
    values = RANDOM.gamma(1, size=20_000).astype("float32")
    layer, of_batches = (
        LAYERS.Discretization(num_bins=10, epsilon=epsilon) for _ in range(2)
    )
    training.adapt(layer, values, world=WORLD, local_batch_size=256)
    of_batches.adapt(tf.data.Dataset.from_tensor_slices(values).batch(256))

    def error(layer):
        shares = [np.mean(values <= boundary) for boundary in layer.bin_boundaries]
        return np.abs(shares - np.arange(1, 10) / 10).max()

    assert error(layer) < min(2 * epsilon, error(of_batches))
    by_rank = hvd.allgather_object(list(layer.bin_boundaries), name="bins")
    assert by_rank == by_rank[:1] * SIZE


TABLE = {
    "age": VALUES[:, 0, 0],
    "city": WORDS[:, 0],
    "home": WORDS[:, 1],
    "income": VALUES[:, 1, 1],
}


def table_layers():
    lookup = LAYERS.StringLookup(max_tokens=20)
    return {
        "age": LAYERS.Normalization(),
        "city": lookup,
        "home": lookup,
        "income": LAYERS.Discretization(num_bins=4),
    }


def check_table(layers):
    mean, variance = np.mean(TABLE["age"]), np.var(TABLE["age"])
    np.testing.assert_allclose(layers["age"].mean, [[mean]], rtol=1e-6)
    np.testing.assert_allclose(layers["age"].variance, [[variance]], rtol=1e-4)
    expected = table_layers()
    expected["city"].adapt(np.concatenate([TABLE["city"], TABLE["home"]]))
    assert layers["city"].get_vocabulary() == expected["city"].get_vocabulary()
    expected["income"].adapt(TABLE["income"])
    assert layers["income"].bin_boundaries == expected["income"].bin_boundaries


@pytest.mark.parametrize("samples", [TABLE, (TABLE, NUMBERS)])
def test_a_dictionary_of_layers(samples):
    check_table(adapt(table_layers(), samples))


def test_a_function_selects():
    layer = LAYERS.Normalization(axis=None)
    adapt(layer, (TABLE, NUMBERS), select=lambda sample: sample[0]["age"] * 2.0)
    np.testing.assert_allclose(layer.adapt_mean, 2 * TABLE["age"].mean(), rtol=1e-6)


def test_a_model():
    layers = table_layers()
    dtypes = {"age": "float32", "income": "float32"}
    inputs = {
        n: keras.Input((1,), dtype=dtypes.get(n, "string"), name=n) for n in TABLE
    }
    encoded = [layers[name](value) for name, value in inputs.items()]
    fixed = LAYERS.StringLookup(vocabulary=["1"])(inputs["city"])
    adapt(keras.Model(inputs, [*encoded, fixed]), (TABLE, NUMBERS))
    check_table(layers)


def test_a_sequential_model():
    text = LAYERS.TextVectorization(output_mode="multi_hot")
    expected = LAYERS.TextVectorization()
    expected.adapt(SENTENCES)
    adapt(keras.Sequential([keras.Input((), dtype="string"), text]), SENTENCES)
    vocabulary = expected.get_vocabulary(include_special_tokens=False)
    assert text.get_vocabulary(include_special_tokens=False) == vocabulary


def test_a_feature_space():
    def make():
        space = keras.utils.FeatureSpace
        features = {
            "age": space.float_normalized(),
            "city": space.string_categorical(),
            "home": space.string_hashed(8),
            "income": space.float_discretized(num_bins=4),
        }
        return space(features, crosses=[("city", "home")])

    expected = make()
    expected.adapt(tf.data.Dataset.from_tensor_slices(TABLE).batch(SAMPLES))
    space = adapt(make(), TABLE)
    rows = {name: tf.constant(column[:9]) for name, column in TABLE.items()}
    np.testing.assert_allclose(space(rows), expected(rows), rtol=1e-4, atol=1e-5)


class OneBadSample(data.Source):
    """Samples of which the last cannot be read; only the last rank reads it."""

    def __init__(self, error):
        self._error = error

    def __len__(self):
        return SAMPLES

    def read(self, indices):
        if SAMPLES - 1 in indices:
            raise self._error
        return indices.astype("float32")


def failing(words):
    if RANK == 1:
        raise ValueError("no such\nlanguage")
    return words


class UnbuiltModel(keras.Model):
    """A model without inputs."""

    def __init__(self):
        super().__init__()
        self.normalization = LAYERS.Normalization()


def built():
    layer = LAYERS.Normalization()
    layer.build((None, 4))
    return layer


ERRORS = {
    "no samples": (LAYERS.Normalization, np.zeros((0, 3)), "expected .samples"),
    "text": (
        LAYERS.Normalization,
        WORDS,
        "layer normalization.*: TypeError: Received string; expected numbers",
    ),
    "floats": (LAYERS.IntegerLookup, VALUES, "expected integers"),
    "integers": (LAYERS.StringLookup, NUMBERS, "expected text"),
    "shape": (built, NUMBERS, r"shape=\(4,\), Received: value.shape=\(3,\)"),
    "axis": (lambda: LAYERS.Normalization(5), NUMBERS, "must be in the range"),
    "two words": (LAYERS.TextVectorization, WORDS, "last shape dimension"),
    "no state": (
        lambda: LAYERS.CategoryEncoding(3),
        NUMBERS,
        "leave it out. Other layers of Keras learn nothing",
    ),
    "rescaling": (
        lambda: LAYERS.Rescaling(3),
        NUMBERS,
        "leave it out. Other layers of Keras learn nothing",
    ),
    "no layer": (lambda: "city", NUMBERS, "Received 'city'; expected Normalization"),
    "no layers": (dict, NUMBERS, "Received {}; expected layers of inputs"),
    "vocabulary": (
        lambda: LAYERS.StringLookup(vocabulary=["a"]),
        WORDS,
        "StringLookup .* was made with its vocabulary",
    ),
    "fixed text": (
        lambda: LAYERS.TextVectorization(vocabulary=["a"]),
        WORDS,
        "was made with its vocabulary",
    ),
    "mean": (
        lambda: LAYERS.Normalization(mean=1, variance=2),
        NUMBERS,
        "was made with",
    ),
    "bins": (lambda: LAYERS.Discretization([1.0]), NUMBERS, "was made with"),
    "key": (
        lambda: {"cty": LAYERS.StringLookup()},
        TABLE,
        "keys age, city, home, income; expected the key cty",
    ),
    "no key": (LAYERS.StringLookup, TABLE, "expected one feature: pass select"),
    "no keys": (
        lambda: {"cty": LAYERS.StringLookup()},
        WORDS,
        r"the keys \(none\); expected the key cty",
    ),
    "inner layer": (
        lambda: keras.Sequential(
            [keras.Input((3,)), LAYERS.Dense(2), LAYERS.Normalization(name="inner")]
        ),
        NUMBERS,
        "layer inner, which is not connected to one of its inputs",
    ),
    "subclass": (UnbuiltModel, NUMBERS, "Received .* expected layers of inputs"),
    "other ranks": (
        LAYERS.Normalization,
        VALUES + np.float32(RANK),
        "same source, of all samples, on all ranks",
    ),
    "lengths": (LAYERS.Normalization, VALUES[RANK:], "expected the same on all ranks"),
    "classes": (
        lambda: (LAYERS.Normalization, LAYERS.Discretization)[RANK](
            **({"num_bins": 3} if RANK else {})
        ),
        NUMBERS,
        "None: Normalization on rank 0 and .*Discretization on rank 1",
    ),
    "a file": (
        LAYERS.Normalization,
        OneBadSample(data.DataError("rows.bin: truncated at 7.")),
        r"rows.bin: truncated at 7\.$",
    ),
    "a bug": (
        LAYERS.Normalization,
        OneBadSample(ZeroDivisionError("by\nzero")),
        "ZeroDivisionError: by zero$",
    ),
    "user": (
        lambda: LAYERS.TextVectorization(standardize=failing, name="words"),
        SENTENCES,
        "Cannot adapt the layer words: ValueError: no such language",
    ),
}


# Beside one of each kind.
LONG = {
    *("text", "integers", "two words", "rescaling", "no layer", "no layers"),
    *("fixed text", "mean", "bins", "no key", "no keys", "lengths", "subclass"),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.release if name in LONG else ())
        for name in ERRORS
    ],
)
def test_an_error_is_one_line_on_all_ranks(name):
    make, samples, expected = ERRORS[name]
    with pytest.raises(JobError, match=expected) as error:
        adapt(make(), samples)
    assert "\n" not in str(error.value)
    texts = hvd.allgather_object(str(error.value), name="errors")
    assert texts == texts[:1] * SIZE


def test_a_layer_is_adapted_again():
    layer = adapt(LAYERS.StringLookup(), WORDS)
    adapt(layer, SENTENCES)
    expected = LAYERS.StringLookup()
    expected.adapt(SENTENCES)
    assert learned(layer) == learned(expected)


def test_a_rank_of_an_elastic_job_adapts_alone(monkeypatch):
    monkeypatch.setattr(adaptation, "is_elastic", lambda: True)
    layers = {"strings": LAYERS.StringLookup(), "moments": LAYERS.Normalization()}
    if RANK == SIZE - 1:
        # The others have started before it, and call no collective.
        adapt(layers, {"strings": WORDS, "moments": VALUES})
        expected = LAYERS.StringLookup()
        expected.adapt(WORDS)
        assert learned(layers["strings"]) == learned(expected)
        mean = VALUES.mean(axis=(0, 1))
        np.testing.assert_allclose(layers["moments"].adapt_mean, mean, rtol=1e-6)
