"""Training that continues when workers are lost, and grows when new ones arrive.

The launcher (`horovodrun --min-np ... --host-discovery-script ...`) starts and places
workers. `run` restores those that are left to the last commit and continues.
"""

from hvdtrain.keras.elastic.callbacks import (
    CommitStateCallback,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
)
from hvdtrain.keras.elastic.state import KerasState, TensorFlowKerasState, run

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "TensorFlowKerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]
