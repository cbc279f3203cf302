"""Callbacks for `model.fit` across ranks.

In this order, where several are used: `BroadcastGlobalVariablesCallback` first, then
`JoinCallback`, `AverageMovingStatisticsCallback`, `MetricAverageCallback`, learning
rates and whatever reads the logs of an epoch (`BestModelCheckpoint`, say),
`StopTogetherCallback`, and `ConsistencyCheckCallback`, which compares what they leave.
"""

from hvdtrain.keras.callbacks.best_model import BestModelCheckpoint
from hvdtrain.keras.callbacks.broadcast import BroadcastGlobalVariablesCallback
from hvdtrain.keras.callbacks.consistency_check import ConsistencyCheckCallback
from hvdtrain.keras.callbacks.joining import JoinCallback
from hvdtrain.keras.callbacks.learning_rate import (
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
)
from hvdtrain.keras.callbacks.metric_average import MetricAverageCallback
from hvdtrain.keras.callbacks.stopping import StopTogetherCallback
from hvdtrain.keras.consistency import DesynchronizedError
from hvdtrain.keras.moving_statistics import AverageMovingStatisticsCallback

__all__ = [
    "AverageMovingStatisticsCallback",
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "ConsistencyCheckCallback",
    "DesynchronizedError",
    "JoinCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "StopTogetherCallback",
]
