"""Comparisons of trajectories that were written by hand."""

import errno
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.install.commands import InstallError
from hvdtrain.job import JobError
from hvdtrain.verify import capture, comparison, isolation, phases, samples
from hvdtrain.verify.step_recorder import StepRecorder
from hvdtrain.verify.trajectory import Directory, State
from hvdtrain.verify.variable_names import VariableNames


def verification_in(directory, *, command=("script.py",)):
    return phases.Verification(
        command=command,
        directory=directory,
        root=directory,
        size=2,
        steps=10,
        dtype=None,
    )


@pytest.fixture
def directories(tmp_path):
    return Directory(tmp_path, "ranks"), Directory(tmp_path, "reference")


def write(
    directory,
    step,
    weight,
    *,
    name="w",
    variables=None,
    rate=0.1,
    metrics=None,
    metrics_of_ranks=None,
):
    state = State(
        variables=variables or {name: np.asarray(weight)},
        learning_rates={"sgd": rate},
        metric_states=[],
        metrics=metrics or {},
        metrics_of_ranks=metrics_of_ranks,
    )
    directory.write("state", 0, step, value=state)


def compare(directories, found, expected, *, start=(0.0, 0.0)):
    ranks, reference = directories
    reference.write("start", 0, 0, value={"w": np.array(start, expected.dtype)})
    write(ranks, 1, found)
    write(reference, 1, expected)
    return comparison.compare(ranks, reference)


def test_rounding_is_equal(directories):
    expected = np.array([1.0, -0.5], "float32")
    compared = compare(directories, expected * (1 + 2e-7), expected)
    assert compared.first is None
    assert compared.largest == pytest.approx(2e-7, rel=0.3)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_change_of_half_the_size_differs_by_its_ratio(directories, dtype):
    start = np.array([3.0, 4.0], dtype)
    change = np.array([1e-4, -2e-4], dtype)
    compared = compare(directories, start + change / 2, start + change, start=start)
    assert compared.first.name == "w"
    assert compared.first.step == 1
    assert compared.first.size == pytest.approx(1e-4, rel=1e-2)
    assert compared.first.ratio == pytest.approx(0.5, rel=1e-2)


@pytest.mark.parametrize(
    ("change", "is_equal"),
    [
        # A millionth of the largest change of the weights, 0.1, is the limit.
        (0.9e-7, True),
        (1.2e-7, False),
    ],
)
def test_gradients_that_are_zero_by_construction(directories, change, is_equal):
    ranks, reference = directories
    names = ("kernel", "bias", "sgd/kernel_momentum", "sgd/bias_momentum")
    start = dict.fromkeys(names[:2], np.zeros(2))
    reference.write("start", 0, 0, value=start)
    for directory, sign in ((ranks, 1), (reference, -1)):
        bias = np.array([sign * change / 2, 0.0])
        values = [np.array([0.1, 0.0]), bias, np.array([1.0, 0.0]), 10 * bias]
        write(directory, 1, 0.0, variables=dict(zip(names, values, strict=True)))
    compared = comparison.compare(ranks, reference)
    assert (compared.first is None) == is_equal
    if is_equal:
        # Not the difference in relation to the bias, which is 2.
        assert compared.largest == pytest.approx(0.9e-6)
    else:
        assert compared.first.name == "bias"


def test_a_change_of_another_direction_has_no_ratio(directories):
    found, expected = np.array([1.0, 2.0]), np.array([2.0, 1.0])
    assert np.isnan(compare(directories, found, expected).first.ratio)


def test_not_a_number_equals_itself_only(directories):
    numbers = np.array([np.nan, 1.0])
    assert compare(directories, numbers, numbers.copy()).first is None
    compared = compare(directories, numbers, np.array([1.0, 1.0]))
    assert compared.first.size == np.inf


@pytest.mark.parametrize(
    ("differences", "compared"),
    [
        ([1e-13, 1e-8, 0.5], 2),
        # The last step is wrong.
        ([1e-13, 1e-13, 0.5], None),
        # float32, or a fault of the first step.
        ([1e-7, 1e-6, 0.5], None),
        ([0.5, 0.5, 0.5], None),
    ],
)
def test_rounding_that_grows_ends_the_comparison(directories, differences, compared):
    ranks, reference = directories
    reference.write("start", 0, 0, value={"w": np.zeros(2)})
    for step, difference in enumerate(differences, start=1):
        expected = np.array([1.0, -0.5])
        write(reference, step, expected)
        write(ranks, step, expected * (1 + difference))
    result = comparison.compare(ranks, reference)
    assert result.is_cut_short == (compared is not None)
    if compared:
        assert result.steps == [1, 2]
        assert result.first is None
    else:
        assert result.first.step == next(
            step for step, each in enumerate(differences, start=1) if each == 0.5
        )


def test_a_variable_of_one_run_is_an_error(directories):
    ranks, reference = directories
    write(ranks, 1, 0.0, name="run-1/w")
    write(reference, 1, 0.0, name="run-2/w")
    with pytest.raises(JobError, match=r"run-1/w in one of two runs"):
        comparison.compare(ranks, reference)


def test_a_shape_that_depends_on_the_batch_is_an_error(directories):
    ranks, reference = directories
    write(ranks, 1, np.zeros(16))
    write(reference, 1, np.zeros(32))
    with pytest.raises(JobError, match=r"\(16,\) on two ranks and \(32,\)"):
        comparison.compare(ranks, reference)


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        # With two ranks, a warm-up in half of the steps to twice the rate.
        (lambda size, step: size * min(step / (8 / size), 1), 2),
        # The same, in equally many steps.
        (lambda size, step: size * min(step / 8, 1), 2),
        (lambda size, step: 0.1, 1),
        (lambda size, step: size**2, 4),
    ],
)
def test_a_learning_rate_is_compared_after_equal_steps_and_samples(
    tmp_path, rate, expected
):
    verification = verification_in(tmp_path)
    for step in range(1, 11):
        write(verification.files("ranks"), step, 0.0, rate=rate(2, step))
    for step in range(1, 21):
        write(verification.files("alone"), step, 0.0, rate=rate(1, step))
    assert verification.scaling() == {"sgd": pytest.approx(expected)}


def test_a_script_by_a_link_is_the_one_in_the_copy(tmp_path, monkeypatch):
    project, directory = tmp_path.resolve() / "project", tmp_path / "phases"
    project.mkdir()
    directory.mkdir()
    (project / "train.py").touch()
    (tmp_path / "link").symlink_to(project)
    monkeypatch.chdir(project)
    commands = []

    def run(self, text, command, **options):
        commands.append(command[-2:])
        assert all(pathlib.Path(path).is_file() for path in command[-2:])
        self._log.touch()
        raise InstallError("failed")

    monkeypatch.setattr(phases.Steps, "run", run)
    copy = directory / "ranks.tree" / (project / "train.py").relative_to("/")
    for path in (tmp_path / "link" / "train.py", "../link/train.py", "train.py"):
        command = [str(path), f"{tmp_path}/link/train.py"]
        verification = verification_in(directory, command=command)
        with pytest.raises(phases.PhaseError):
            verification.run("ranks", "")
    assert commands == 3 * [[str(copy), str(copy)]]
    assert not (directory / "ranks.tree").exists()


def test_decisions_of_ranks_explain_an_error_of_the_ranks(tmp_path, monkeypatch):
    def run(self, text, command, **options):
        self._log.write_text("ValueError: text\n")
        raise InstallError("failed")

    monkeypatch.setattr(phases.Steps, "run", run)
    monkeypatch.setattr(phases.isolation, "make_tree", lambda *args, **kwargs: [])
    verification = verification_in(tmp_path)
    for rank in range(2):
        value = {"loss": [float(rank)]}
        verification.files("ranks").write("monitored", rank, value=value)
    for phase, reason in {
        "ranks": "loss, by which a callback decides, differs by rank",
        "reference": "The script failed: ValueError: text",
        "alone": "The script failed: ValueError: text",
    }.items():
        with pytest.raises(phases.PhaseError, match=f"^{reason}"):
            verification.run(phase, "")


def test_a_copy_for_which_there_is_no_space(tmp_path, monkeypatch):
    def make_tree(tree, *args, **kwargs):
        tree.mkdir()
        raise OSError(errno.ENOSPC, "No space left on device", f"{tree}/x")

    monkeypatch.setattr(isolation, "make_tree", make_tree)
    with pytest.raises(JobError, match=r"ranks.tree/x: No space left on device\. Set"):
        verification_in(tmp_path).run("ranks", "")
    assert not (tmp_path / "ranks.tree").exists()


class Variable:
    def __init__(self, path):
        self.path = path


def test_variables_of_one_path_are_named_in_the_order_of_their_creation():
    names = VariableNames()
    first, other, second = map(Variable, ("a/kernel", "b/kernel", "a/kernel"))
    for variable in (first, other, second):
        names.add(variable)
    assert names.by_name([second, other, first, second]) == {
        "a/kernel #2": second,
        "b/kernel": other,
        "a/kernel": first,
    }
    assert names.place([second, other]) == 1


def test_metrics_are_compared(directories):
    ranks, reference = directories
    write(ranks, 1, 0.0)
    results = {"metrics": {"mae": 2.0}, "metrics_of_ranks": {"mae": 2.1}}
    write(reference, 1, 0.0, **results)
    assert comparison.compare(ranks, reference).first.name == "metric mae"


def test_integers_are_equal_or_not(directories):
    compared = compare(directories, np.array([7, 1]), np.array([7, 2]))
    assert compared.first.size == 1


def read(directory, *batches_by_rank):
    for rank, batches in enumerate(batches_by_rank):
        directory.write("training", rank, 3, value=True)
        for number, batch in enumerate(batches):
            columns = [np.asarray(batch), np.ones(len(batch))]
            directory.write("batch", rank, 3, number, value=columns)
    return samples.read_by_ranks(directory, size=len(batches_by_rank))


def test_samples_of_several_ranks_are_counted(directories):
    found = read(directories[0], [[1, 2], [3, 4]], [[5, 6], [1, 7]])
    assert (found.number, found.shared) == (8, 0.25)
    assert found.sizes == [2, 2]
    assert not found.has_equal_batches


def test_the_first_unequal_batches_are_named(directories):
    found = read(directories[0], [[1, 2], [3, 4]], [[5, 6], [7]])
    assert found.sizes == [2, 1]


def test_equal_batches_are_seen(directories):
    assert read(directories[0], [[1, 2], [3, 4]], [[8, 9], [3, 4]]).has_equal_batches


@pytest.mark.parametrize(
    ("seeds_by_rank", "expected"),
    [
        ([[(87654321, 1)], [(87654321, 1)]], False),
        ([[(87654321, 0)], [(87654321, 1)]], True),
        # Another order in each process.
        ([[(0, 0)], [(0, 0)]], True),
        ([[], []], False),
    ],
)
def test_orders_of_data_that_are_sharded(directories, seeds_by_rank, expected):
    for rank, seeds in enumerate(seeds_by_rank):
        directories[0].write("shuffles", rank, 3, value=seeds)
        # Of an evaluation.
        directories[0].write("shuffles", rank, 4, value=[(0, 0)])
    found = read(directories[0], [[1, 2], [3, 4]], [[5, 6], [7, 8]])
    assert found.has_unequal_orders == expected
    assert found.is_distinct
    assert not read(directories[0], [[1, 2], [2, 4]], [[5, 6], [7, 8]]).is_distinct
    # Rank 0 has begun another stream.
    directories[0].write("training", 0, 5, value=True)
    directories[0].write("shuffles", 0, 5, value=[(87654321, 1)])
    found = read(directories[0], [[1, 2], [3, 4]], [[5, 6], [7, 8]])
    assert found.has_unequal_orders == expected


def test_streams_of_an_evaluation_are_left_out(directories):
    for rank in range(2):
        directories[0].write("batch", rank, 5, 0, value=[np.ones(4)])
    assert read(directories[0], [[1, 2]], [[3, 4]]).number == 4


def test_the_error_of_a_rank_is_found_among_pieces_of_lines(tmp_path):
    log = tmp_path / "ranks.log"
    log.write_text("""\
== 2 ranks: horovodrun -np 2 python script.py
[1,0]<stderr>:    [1,1]<stderr>:Traceback (most recent call last):
[1,0]<stderr>:raise ValueError('a reason')[1,1]<stderr>:  File "script.py", line 1
[1,0]<stderr>:
[1,0]<stderr>:ValueError[1,1]<stderr>:    raise[1,0]<stderr>:: [1,0]<stderr>:a reason
--------------------------------------------------------------------------
mpirun detected that one or more processes exited with non-zero status
""")
    assert phases.last_error(log) == "ValueError: a reason"


def test_the_error_is_that_of_the_rank_that_failed_first(tmp_path):
    log = tmp_path / "ranks.log"
    log.write_text("""\
[0]<stderr>:ValueError: a warning
[0]<stderr>:Received no data.
[1]<stderr>:rank 1 on vm was killed by SIGTERM
horovodrun: the first rank that failed is rank 0 on vm: exit code 1.
""")
    assert phases.last_error(log, rank=0) == "ValueError: a warning"
    assert phases.last_error(log, rank=0, is_exit=True) == "Received no data."
    log.write_text("Received no data.\n")
    assert phases.last_error(log, rank=0, is_exit=True) == "Received no data."


TARGETS = np.array([[1, 0], [1, 1], [0, 1], [0, 0]], "float32")


@pytest.mark.parametrize(
    ("loss", "is_mean"),
    [
        (keras.losses.MeanSquaredError(), True),
        (keras.losses.MeanSquaredError(reduction="sum"), True),
        (keras.losses.Dice(axis=(1,)), True),
        (keras.losses.Dice(), False),
        (keras.losses.Tversky(), False),
    ],
)
@pytest.mark.parametrize("wrap", [lambda loss: loss, tf.function])
def test_losses_that_are_no_means_over_samples(
    loss, is_mean, wrap, directories, monkeypatch
):
    # Restored after the test.
    monkeypatch.setattr(keras.losses.Loss, "__call__", keras.losses.Loss.__call__)
    recorder = StepRecorder(directories[0], rank=0, steps=1, on_steps=print)
    capture.note_losses(recorder)
    targets = tf.constant(TARGETS)
    wrap(lambda y_true, y_pred: loss(y_true, y_pred))(targets, 0.2 + targets * 0.5)
    assert recorder.are_means == {loss: is_mean}


class OfFeatures(keras.losses.Loss):
    """A loss that reads a tensor of the forward pass."""

    def call(self, y_true, y_pred):
        return tf.reduce_mean(tf.abs(y_true - y_pred) * self.features, -1)


class OfFourRows(keras.losses.Loss):
    """A loss that computes with the number of samples of a batch."""

    def call(self, y_true, y_pred):
        return tf.reduce_mean(tf.reshape(tf.abs(y_true - y_pred), (4, 2)), -1)


@pytest.mark.parametrize(
    ("loss", "shape"),
    [
        (OfFeatures(), [4, 2]),
        (OfFeatures(), [None, None]),
        (OfFourRows(), [4, 2]),
        (OfFourRows(reduction="sum"), [None, None]),
        (OfFourRows(), None),
    ],
)
def test_losses_that_cannot_be_computed_of_other_batches(
    loss, shape, directories, monkeypatch
):
    monkeypatch.setattr(keras.losses.Loss, "__call__", keras.losses.Loss.__call__)
    recorder = StepRecorder(directories[0], rank=0, steps=1, on_steps=print)
    capture.note_losses(recorder)

    @tf.function(input_signature=[tf.TensorSpec(shape)] * 2)
    def step(y_true, y_pred):
        loss.features = 2.0 * y_pred
        return loss(y_true, y_pred)

    predictions = 0.2 + TARGETS * 0.5
    found = float(step(TARGETS, predictions))
    differences = np.abs(TARGETS - predictions)
    if isinstance(loss, OfFeatures):
        differences *= 2 * predictions
    expected = np.mean(differences) * (4 if loss.reduction == "sum" else 1)
    assert found == pytest.approx(expected)
    assert all(recorder.are_means.values())
