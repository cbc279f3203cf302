"""`training.predict` in one process: contents of files, names, what is refused."""

import json
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain import data, training
from hvdtrain.job import JobError, World
from hvdtrain.training import prediction

WORLD = World()
SAMPLES = 21
X = np.random.RandomState(0).normal(size=(SAMPLES, 4)).astype("float32")
OPTIONS = {"world": WORLD, "local_batch_size": 4, "samples_per_part": 8}


def make_model():
    """A model with outputs of the shapes (1,), (3,) and (2, 4)."""
    keras.utils.set_random_seed(7)
    x = keras.Input((4,))
    hidden = keras.layers.Dense(8, "tanh")(x)
    pair = [keras.layers.Dense(3)(hidden), keras.layers.Reshape((2, 4))(hidden)]
    return keras.Model(x, {"score": keras.layers.Dense(1)(hidden), "pair": pair})


class Function(keras.Model):
    """A model whose predictions are those of a function of tensors."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def predict_step(self, batch):
        x, *_ = keras.utils.unpack_x_y_sample_weight(batch)
        return self.function(x)


def predict(out, function=None, x=X, **options):
    model = Function(function) if function else make_model()
    return training.predict(model, x, out=str(out), **OPTIONS | options)


@pytest.fixture(scope="module")
def expected():
    outputs = make_model().predict(X, verbose=0)
    first, second = outputs["pair"]
    return {"score": outputs["score"], "pair_0": first, "pair_1": second}


def test_parquet(tmp_path, expected):
    parquet = pytest.importorskip("pyarrow.parquet")
    result = predict(tmp_path / "scores-*.parquet")
    assert result.samples == SAMPLES
    assert [path.rpartition("/")[2] for path in result.paths] == [
        f"scores-0000{part}-of-00003.parquet" for part in range(3)
    ]
    assert parquet.read_table(result.paths[2])["number"].to_pylist() == [*range(16, 21)]
    source = data.Parquet(f"{tmp_path}/scores-*.parquet")
    found = source.read(np.arange(SAMPLES))
    np.testing.assert_array_equal(found["number"], np.arange(SAMPLES))
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, atol=1e-6)


def test_npy(tmp_path, expected):
    result = predict(tmp_path / "scores-*.npy")
    found = np.concatenate([np.load(path) for path in result.paths])
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, atol=1e-6)
    # A single output is a plain array.
    result = predict(tmp_path / "sums-*.npy", lambda x: tf.reduce_sum(x, axis=1))
    found = np.concatenate([np.load(path) for path in result.paths])
    np.testing.assert_allclose(found, X.sum(axis=1), atol=1e-6)


def test_tfrecord(tmp_path, expected):
    predict(tmp_path / "scores-*.tfrecord")
    features = {
        name: tf.io.FixedLenFeature(values.shape[1:], tf.float32)
        for name, values in expected.items()
    }
    features["number"] = tf.io.FixedLenFeature([], tf.int64)
    source = data.TFRecord(f"{tmp_path}/scores-*.tfrecord")
    found = tf.io.parse_example(source.read(np.arange(SAMPLES)), features)
    np.testing.assert_array_equal(found["number"], np.arange(SAMPLES))
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, atol=1e-6)


@pytest.mark.parametrize("suffix", ["parquet", "tfrecord"])
def test_text_and_other_types(tmp_path, suffix):
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    outputs = {
        "text": lambda x: tf.strings.as_string(tf.range(tf.shape(x)[0])),
        "bool": lambda x: x[:, 0] > 0,
        "short": lambda x: tf.cast(x, tf.bfloat16),
    }
    result = predict(
        tmp_path / f"s-*.{suffix}", lambda x: {n: f(x) for n, f in outputs.items()}
    )
    if suffix == "parquet":
        found = data.Parquet(result.paths).read(np.arange(SAMPLES))
        assert found["text"].tolist() == [b"%d" % (n % 4) for n in range(SAMPLES)]
        np.testing.assert_array_equal(found["bool"], X[:, 0] > 0)
    else:
        record = next(iter(tf.data.TFRecordDataset(result.paths[1]))).numpy()
        features = tf.train.Example.FromString(record).features.feature
        assert features["text"].bytes_list.value == [b"0"]
        short = tf.cast(X[8], tf.bfloat16)
        np.testing.assert_array_equal(features["short"].float_list.value, short)


def test_arrays_of_pairs_and_of_an_eager_model():
    pairs = training.predict(make_model(), (X, X[:, 0]), **OPTIONS)
    model = make_model()
    model.compile(run_eagerly=True)
    alone = training.predict(model, X, **OPTIONS)
    expected = model.predict(X, verbose=0)
    for found in (pairs, alone):
        keras.tree.map_structure(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, expected
        )


def test_one_graph_for_batches_of_all_sizes():
    traces = []

    def function(x):
        traces.append(x.shape)
        return x

    found = training.predict(Function(function), X, **OPTIONS)
    np.testing.assert_array_equal(found, X)
    assert traces == [(None, 4)]


def test_samples_are_mapped():
    source = data.map_samples(X, lambda x: x * 2)
    found = training.predict(Function(lambda x: x), source, **OPTIONS)
    np.testing.assert_array_equal(found, 2 * X)


@pytest.mark.parametrize(
    ("size", "max_bytes", "parts"),
    [(None, 1 << 20, 63), (None, 40, 125), (9, 256, 84), (5000, 256, 1)],
)
def test_the_size_of_parts(tmp_path, monkeypatch, size, max_bytes, parts):
    """By default, of a 64th of the samples or less; of whole batches."""
    monkeypatch.setattr(prediction, "_MAX_PART_BYTES", max_bytes)
    x = np.zeros(1000, "float32")
    out = tmp_path / "scores-*.npy"
    assert len(predict(out, lambda x: x, x, samples_per_part=size).paths) == parts


def test_a_complete_job_predicts_nothing(tmp_path):
    out = tmp_path / "scores-*.npy"
    result = predict(out)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    content = (tmp_path / "scores-00002-of-00003.npy").read_bytes()
    (tmp_path / "scores-00001-of-00003.npy").unlink()
    (tmp_path / "scores-00002-of-00003.npy").write_bytes(b"")
    assert predict(out) == result
    after = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    changed = sorted(path.name for path in before if before[path] != after[path])
    assert changed == ["scores-00001-of-00003.npy", "scores-00002-of-00003.npy"]
    assert (tmp_path / "scores-00002-of-00003.npy").read_bytes() == content


def test_a_crash_before_the_first_part_leaves_files_without_content(tmp_path):
    out = tmp_path / "scores-*.npy"
    (tmp_path / "_scores.json").touch()
    (tmp_path / "scores-00000-of-00003.npy").touch()
    result = predict(out)
    assert predict(out) == result
    assert all(path.stat().st_size for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": X + 1}, r"_scores\.json of other samples"),
        ({"x": X[:20]}, r"_scores\.json of other source"),
        ({"samples_per_part": 12}, r"_scores\.json of other samples_per_part"),
        ({"function": lambda x: x[:, 0]}, r"_scores\.json of other weights, outputs"),
    ],
)
def test_files_of_other_predictions_are_refused(tmp_path, change, message):
    out = tmp_path / "scores-*.npy"
    predict(out)
    with pytest.raises(JobError, match=f"{message};.*remove them"):
        predict(out, **change)


def test_files_of_other_weights_are_refused(tmp_path):
    model, out = make_model(), tmp_path / "scores-*.npy"
    training.predict(model, X, out=out, **OPTIONS)
    model.weights[-1].assign(model.weights[-1] + 1e-6)
    with pytest.raises(JobError, match=r"_scores\.json of other weights;"):
        training.predict(model, X, out=out, **OPTIONS)


def test_files_without_their_description_are_refused(tmp_path):
    predict(tmp_path / "scores-*.npy")
    (tmp_path / "_scores.json").unlink()
    with pytest.raises(JobError, match=r"scores-00000-of-00003\.npy without _scores"):
        predict(tmp_path / "scores-*.npy")
    for content in ("[", "[]", "[" * 200_000):
        (tmp_path / "_scores.json").write_text(content)
        with pytest.raises(JobError, match=r"^Cannot use _scores\.json in .*[^\n]*$"):
            predict(tmp_path / "scores-*.npy")


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("scores.parquet", r"expected one \* in the name"),
        ("*/scores-*.parquet", r"expected one \* in the name"),
        ("scores-*.csv", r"a suffix of \.parquet, \.npy, \.tfrecord"),
        ("file/scores-*.npy", r"^Cannot use _scores\.json in .*/file: .*"),
    ],
)
def test_an_out_that_cannot_be_used_is_refused(tmp_path, out, message):
    (tmp_path / "file").touch()
    with pytest.raises(JobError, match=message):
        predict(tmp_path / out)


@pytest.mark.parametrize(
    ("suffix", "function", "message"),
    [
        ("npy", lambda x: tf.reduce_sum(x), r"output, .*shape \(\) for 4 samples"),
        ("npy", lambda x: tf.RaggedTensor.from_tensor(x), "RaggedTensor"),
        ("npy", lambda x: {"number": x}, "the output number"),
        ("npy", lambda x: tf.strings.as_string(x), r"object\[4\], for \.npy"),
        ("parquet", lambda x: tf.complex(x, x), r"complex64\[4\], for \.parquet"),
        ("parquet", lambda x: x[:, :0], r"float32\[0\], for \.parquet"),
        ("tfrecord", lambda x: tf.cast(x, "float64"), r"float64\[4\], for \.tfrecord"),
        ("npy", lambda x: x[:, : tf.shape(x)[0]], r"\[1\]'} in part 2; .*\[4\]'}"),
    ],
)
def test_outputs_that_files_cannot_hold_are_refused(
    tmp_path, suffix, function, message
):
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    with pytest.raises(JobError, match=message) as raised:
        predict(tmp_path / f"scores-*.{suffix}", function)
    assert "\n" not in str(raised.value)


def test_parquet_needs_pyarrow(tmp_path, monkeypatch):
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(JobError, match=r"pip install 'hvdtrain\[parquet\]'"):
        predict(tmp_path / "scores-*.parquet", lambda x: x)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "sizes",
    [{"local_batch_size": 0}, {"samples_per_part": 0}, {"samples_per_part": 2.5}],
)
def test_sizes_are_checked(sizes):
    with pytest.raises(JobError, match="expected 1 or more"):
        training.predict(Function(lambda x: x), X, **OPTIONS | sizes)


def test_a_store(tmp_path):
    """The objects are the files; what is there is not predicted again."""
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    result = predict("memory://predictions/run/scores-*.npy")
    predict(tmp_path / "scores-*.npy")
    assert result.paths[0] == "memory://predictions/run/scores-00000-of-00003.npy"
    for path in tmp_path.iterdir():
        stored = memory.cat_file(f"/predictions/run/{path.name}")
        assert stored == path.read_bytes()
    memory.pipe_file("/predictions/run/scores-00000-of-00003.npy", b"kept")
    memory.rm_file("/predictions/run/scores-00001-of-00003.npy")
    memory.pipe_file("/predictions/run/scores-00002-of-00003.npy", b"")
    predict("memory://predictions/run/scores-*.npy")
    assert memory.cat_file("/predictions/run/scores-00000-of-00003.npy") == b"kept"
    for number in (1, 2):
        assert memory.size(f"/predictions/run/scores-0000{number}-of-00003.npy")
    outputs = json.loads(memory.cat_file("/predictions/run/_scores.json"))["outputs"]
    assert outputs["pair_1"] == "float32[2, 4]"
