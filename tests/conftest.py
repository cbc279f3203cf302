"""What tests of all tiers share."""

import os
import pathlib

import pytest

from hvdtrain.data import default_cache_dir


@pytest.fixture(scope="session")
def real_mnist():
    """The directory of the real MNIST, which the project does not ship."""
    given = os.environ.get("HVDTRAIN_MNIST_DIR")
    directory = pathlib.Path(given or default_cache_dir())
    if not (directory / "mnist.npz").is_file():
        pytest.skip("no real MNIST: set HVDTRAIN_MNIST_DIR to the folder of mnist.npz")
    return directory
