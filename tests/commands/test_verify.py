"""A verification tells scripts with one fault apart, and passes those without."""

import pathlib
import re
import signal
import sys

import pytest
from verified_scripts import CLEAN, FAULTS, FIT, LOOP, REFUSED
from verified_ways import RIGHT, WRONG, changed

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
VERIFY = [sys.executable, "-m", "hvdtrain.verify", "-np", "2"]

# One of these scripts is in the README's command, two are long tests, which have no
# forks, and the others are in the tiers verify and release. Other ways to write them
# are in the tier release.
SHORT = {"no broadcast"}
LONG = {"fit"}
RELEASE = {
    *("evaluations", "two models", "warm-up", "train_on_batch", "moments of all ranks"),
    *("loss of all batches", "broadcast after the first step", "a sum that is divided"),
    *("sum of means", "vocabularies", "sum of penalties", "loss of a batch"),
    *("rate of one rank", "random numbers", "compression", "dense rows"),
    *("an error of a program", "an error of one rank"),
}


def in_tiers(names):
    """Return the names, each with the mark of its tier."""
    for name in names:
        tier = "long" if name in LONG else "release" if name in RELEASE else "verify"
        marks = [getattr(pytest.mark, tier)] if name not in SHORT else []
        yield pytest.param(name, marks=marks)


@pytest.fixture
def verify(run, tmp_path, request):
    """Return `verify(text)`: the job that verifies a script of this text."""
    forked = not request.node.get_closest_marker("long")

    def verify(text):
        script = tmp_path / "script.py"
        script.write_text(text)
        return run([str(script)], program=VERIFY, forked=forked)

    return verify


@pytest.mark.parametrize("name", in_tiers(CLEAN))
def test_a_script_that_is_right(verify, name):
    job = verify(CLEAN[name])
    assert job.returncode == 0, job.text
    steps = 12 if name == "accumulation" else 10
    assert re.search(rf"^equal to \de-\d+ over {steps} steps", job.text, re.M), job.text
    assert "0.0% of them" in job.text or name in ("loop", "two models", "masks"), (
        job.text
    )


@pytest.mark.parametrize("name", in_tiers(FAULTS))
def test_a_script_with_a_fault(verify, name):
    text, replacements, expected = FAULTS[name]
    for old, new in replacements.items():
        assert old in text
        text = text.replace(old, new)
    job = verify(text)
    assert job.returncode == 1, job.text
    assert expected in job.text
    # No other reason comes before it.
    places = [job.text.find(each) for *_, each in FAULTS.values() if each in job.text]
    assert job.text.find(expected) == min(places), job.text


@pytest.mark.release
@pytest.mark.parametrize("name", RIGHT)
def test_a_way_that_is_right(verify, name):
    job = verify(RIGHT[name])
    assert job.returncode == 0, job.text
    found = re.search(
        r"^equal to (\S+) over 10 steps\nnot compared +(.*)", job.text, re.M
    )
    assert found, job.text
    assert float(found[1]) < 1e-4
    left_out = {
        "augmentation": "augmentation (random_flip, random_translation)",
        "a metric": "the metric largest",
    }
    assert left_out.get(name, "evaluations") in found[2]


@pytest.mark.release
@pytest.mark.parametrize("name", WRONG)
def test_a_way_that_is_wrong(verify, name):
    text, replacements, expected = WRONG[name]
    job = verify(changed(text, *replacements.items()))
    assert job.returncode == 1, job.text
    assert expected in job.text


@pytest.mark.parametrize("name", in_tiers(REFUSED))
def test_a_script_that_cannot_be_compared(verify, name):
    text, expected = REFUSED[name]
    assert text not in (FIT, LOOP)
    job = verify(text)
    assert job.returncode == 1, job.text
    assert expected in job.text


@pytest.mark.parametrize(
    "name", in_tiers(["custom_loop.py", "gan.py", "mixed_precision.py"])
)
def test_an_example(run, name, tmp_path):
    """The examples compute what one process computes; GANs draw noise of their own."""
    job = run(
        [str(EXAMPLES / name)],
        program=VERIFY,
        environment={
            "HVDTRAIN_MNIST_URLS": "http://127.0.0.1:1/",
            "HVDTRAIN_CACHE_DIR": str(tmp_path),
        },
    )
    assert job.returncode == 0, job.text
    assert "over 10 steps" in job.text


@pytest.mark.verify
def test_a_module_with_flags_of_its_own(run, tmp_path):
    flags = ["--dataset=digits", f"--model_dir={tmp_path}", "--model=mlp"]
    job = run(["--steps=3", "-m", "hvdtrain.mnist", *flags], program=VERIFY)
    assert job.returncode == 0, job.text
    assert "equal to" in job.text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["missing.py"], "Received missing.py; expected a Python script."),
        ([], "Received no script; expected one or more"),
        (["--np=1", "script.py"], "--np"),
        (["--np=1", "-m", "hvdtrain.mnist"], "--np"),
    ],
)
def test_bad_input(run, arguments, expected):
    job = run(arguments, program=VERIFY)
    assert job.returncode in (1, 2)
    assert expected in job.text


@pytest.mark.verify
def test_a_script_without_steps(verify):
    job = verify("import hvdtrain.keras as hvd\nhvd.init()\n")
    assert job.returncode == 1
    assert "a script without a step" in job.text


# That a script with a fault is found, README's command tests on another one.
@pytest.mark.long
def test_a_script_that_fails_with_its_own_flags(run, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys\nraise ValueError(sys.argv[1:])\n")
    job = run(["--steps=3", str(script), "--steps=4", "-m", "x"], program=VERIFY)
    assert job.returncode == 1
    expected = "The script failed: ValueError: ['--steps=4', '-m', 'x']"
    assert expected in job.text


@pytest.mark.long
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        *(
            pytest.param(each, marks=pytest.mark.release)
            for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
        ),
    ],
)
def test_a_signal_ends_all_ranks_and_leaves_no_file(start, tmp_path, number):
    script = tmp_path / "script.py"
    script.write_text(LOOP.replace("    step(x, y)", "    input()"))
    folder = tmp_path / "temporary"
    folder.mkdir()
    job = start([str(script)], program=VERIFY, environment={"TMPDIR": str(folder)})
    job.wait_until(job.ranks, "a rank")
    job.process.send_signal(number)
    # Waits for the end of all processes.
    assert job.wait().returncode == 128 + number
    assert not list(folder.iterdir())
    assert "Traceback" not in job.text
