"""Training of a Keras model on all ranks, with exact numbers of steps.

Importing this package loads TensorFlow. Positions in a run are global steps: batches
that each rank has taken since the start. Only `plan` converts them to epochs of `fit`.
"""

# First: it raises one line where the libraries do not fit each other.
from hvdtrain import libraries  # isort: split

from hvdtrain.training import observers, replicas, run_directory
from hvdtrain.training.checkpoint.restoring import position
from hvdtrain.training.elastic import run_elastic
from hvdtrain.training.evaluation import evaluate
from hvdtrain.training.exporting import BestExporter, FinalExporter, LatestExporter
from hvdtrain.training.loop import train_and_evaluate
from hvdtrain.training.observers import make_observers
from hvdtrain.training.plan import Plan
from hvdtrain.training.specs import EvalSpec, Position, Result, RunConfig, TrainSpec
