"""Horovod training on Keras 3, where N ranks compute what the N-times batch does.

`hvdtrain.keras` is the drop-in for `horovod.tensorflow.keras`; `hvdtrain.run` calls a
function on the ranks of a new job. Importing `hvdtrain` itself loads no TensorFlow.
"""

from typing import TYPE_CHECKING

from hvdtrain import interruption, lazy

if TYPE_CHECKING:
    from hvdtrain.runner.engine import RunError as RunError
    from hvdtrain.runner.ray import Ray as Ray
    from hvdtrain.runner.results import LostRankError as LostRankError
    from hvdtrain.runner.results import RankError as RankError
    from hvdtrain.runner.run import run as run
    from hvdtrain.runner.slurm import Slurm as Slurm
    from hvdtrain.runner.spark import Spark as Spark

__version__ = "0.1.0"

interruption.end_program_on_signals()

__getattr__ = lazy.getattr_of(
    __name__,
    {
        "run": "runner.run",
        "Ray": "runner.ray",
        "Slurm": "runner.slurm",
        "Spark": "runner.spark",
        "RunError": "runner.engine",
        "RankError": "runner.results",
        "LostRankError": "runner.results",
    },
    optional=("ray", "pyspark", "submitit"),
)
