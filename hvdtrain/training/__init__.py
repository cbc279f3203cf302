"""Training of a Keras model on all ranks, with exact numbers of steps.

Importing this package loads nothing: its names load TensorFlow when they are first
used, which is after `job.start`. Positions in a run are global steps: batches that each
rank has taken since the start. Only `plan` converts them to epochs of `fit`.
"""

from typing import TYPE_CHECKING

from hvdtrain import lazy

if TYPE_CHECKING:
    from hvdtrain.checkpoint.header import Position
    from hvdtrain.training import observers, run_directory
    from hvdtrain.training.adaptation import adapt
    from hvdtrain.training.elastic import run_elastic
    from hvdtrain.training.evaluation import evaluate
    from hvdtrain.training.exporting import (
        BestExporter,
        FinalExporter,
        LatestExporter,
    )
    from hvdtrain.training.fit_source import fit
    from hvdtrain.training.observers import make_observers
    from hvdtrain.training.prediction import Predictions, predict
    from hvdtrain.training.run_directory import position
    from hvdtrain.training.specs import (
        EvalSpec,
        Plan,
        Result,
        RunConfig,
        TrainSpec,
    )
    from hvdtrain.training.train import train_and_evaluate

_MODULES = {
    **dict.fromkeys(("observers", "run_directory"), ""),
    "adapt": "adaptation",
    "position": "run_directory",
    "run_elastic": "elastic",
    "evaluate": "evaluation",
    **dict.fromkeys(("BestExporter", "FinalExporter", "LatestExporter"), "exporting"),
    "train_and_evaluate": "train",
    "make_observers": "observers",
    "fit": "fit_source",
    **dict.fromkeys(("Predictions", "predict"), "prediction"),
    **dict.fromkeys(
        ("EvalSpec", "Plan", "Position", "Result", "RunConfig", "TrainSpec"), "specs"
    ),
}
__all__ = list(_MODULES)
# First: libraries raises one line where the libraries do not fit each other.
__getattr__ = lazy.getattr_of(__name__, _MODULES, first="hvdtrain.libraries")
