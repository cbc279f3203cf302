"""supported.py and setup.cfg name the same versions."""

import configparser
import pathlib

import pytest

from hvdtrain.install import supported


@pytest.fixture(scope="module")
def setup():
    config = configparser.ConfigParser()
    config.read(pathlib.Path(__file__).parents[2] / "setup.cfg")
    return config


def lines(setup, section, option):
    return [line.partition(";")[0] for line in setup[section][option].splitlines()]


def versions(first, last):
    """Return the range of a requirement, to the last minor version."""
    major, minor = last
    return f">={supported.text(first)},<{major}.{minor + 1}"


def test_tensorflow(setup):
    wanted = versions(supported.TENSORFLOW[0], supported.TENSORFLOW[-1])
    names = ("tensorflow-cpu", "tensorflow")
    found = lines(setup, "options.extras_require", "cpu")
    assert found[1:] == [name + wanted for name in names]


def test_every_line_of_tensorflow_between_the_first_and_the_last(setup):
    minors = [minor for _, minor in supported.TENSORFLOW]
    assert minors == list(range(minors[0], minors[-1] + 1))


def test_keras(setup):
    found = lines(setup, "options", "install_requires")
    assert f"keras{versions(*supported.KERAS)}" in found


def test_python(setup):
    assert setup["options"]["python_requires"] == versions(*supported.PYTHON)
    classifiers = lines(setup, "metadata", "classifiers")
    (_, first), (_, last) = supported.PYTHON
    prefix = "Programming Language :: Python :: 3."
    found = [line.removeprefix(prefix) for line in classifiers if prefix in line]
    assert found == [str(minor) for minor in range(first, last + 1)]
