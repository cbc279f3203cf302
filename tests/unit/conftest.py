"""What several unit tests need."""

import pytest


@pytest.fixture(scope="module")
def one_rank():
    """Start Horovod in this process, which is the only rank."""
    # Not at the top: many unit tests load no TensorFlow.
    import hvdtrain.keras as hvd

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOROVOD_CONTROLLER", "gloo")
        patch.setenv("HOROVOD_CPU_OPERATIONS", "gloo")
        hvd.init()
