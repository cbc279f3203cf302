"""Training that survives the loss of workers, and grows when new ones come.

The launcher (`horovodrun --min-np ... --host-discovery-script ...`) restarts and
places workers; `run` brings those that live back to the last commit and goes on.
"""

from hvdtrain.keras.elastic.callbacks import (
    CommitStateCallback,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
)
from hvdtrain.keras.elastic.running import run
from hvdtrain.keras.elastic.state import KerasState

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]
