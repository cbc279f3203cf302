"""The options of a benchmark, and their defaults by workload. Loads no TensorFlow."""

import dataclasses
import re

from hvdtrain.job.world import MeshShape, SharedJobError

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Defaults:
    """What a workload takes where the flags are 0.

    Attributes:
        batch_size: samples per rank and step.
        steps_per_execution: steps per call of the compiled train function.
        rounds: rounds of all variants.
        seconds: of each variant in each round.
    """

    batch_size: int
    steps_per_execution: int
    rounds: int = 7
    seconds: float = 1.0


# mlp, mlp512 and cnn take the batches of the table in the README and the steps per
# execution that `hvdtrain.mnist` has with these batches.
WORKLOADS = {
    "mlp": Defaults(batch_size=64, steps_per_execution=20),
    "mlp512": Defaults(batch_size=64, steps_per_execution=20),
    "cnn": Defaults(batch_size=128, steps_per_execution=20, rounds=3, seconds=6.0),
    "small_cnn": Defaults(batch_size=64, steps_per_execution=10, rounds=5, seconds=2.0),
    "resnet18": Defaults(batch_size=16, steps_per_execution=1, rounds=3, seconds=18.0),
    "backward": Defaults(batch_size=1, steps_per_execution=1, rounds=5, seconds=3.0),
    "recommender": Defaults(batch_size=512, steps_per_execution=1, seconds=1.5),
    "wide": Defaults(batch_size=64, steps_per_execution=1, rounds=5, seconds=3.0),
}
# These are trained in several kinds of parallelism.
OF_PARALLELISM = ("recommender", "wide")
_OF_A_FUNCTION = Defaults(batch_size=32, steps_per_execution=1, rounds=5, seconds=2.0)
# Batches are not used. Four paths of ten sizes, in each round.
_OF_COLLECTIVES = Defaults(batch_size=1, steps_per_execution=1, rounds=7, seconds=0.1)
_FIRST_BYTES, _FACTOR = 1000, 4
STRATEGIES = ("horovod", "mirrored", "split", "single")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a benchmark, with the names and the meaning of its flags."""

    workload: str
    strategy: str
    devices: int
    collectives: bool
    max_bytes: int
    rounds: int
    seconds: float
    batch_size: int
    steps_per_execution: int
    dataset: str
    data_dir: str | None
    backward_ms: float
    tables: tuple
    columns: int
    units: tuple
    optimizer: str
    seed: int
    consistency_steps: int
    json: str | None
    plot: str | None

    def with_defaults(self):
        """Return the options with the workload's defaults in the place of zeros."""
        defaults = WORKLOADS.get(self.workload, _OF_A_FUNCTION)
        if self.collectives:
            defaults = _OF_COLLECTIVES
        if self.strategy == "mirrored":
            # Keras' `fit` fails with more, under this strategy.
            defaults = dataclasses.replace(defaults, steps_per_execution=1)
        chosen = {
            name: getattr(self, name) or value
            for name, value in dataclasses.asdict(defaults).items()
        }
        return dataclasses.replace(self, **chosen)

    def check(self, size):
        """Raise `SharedJobError` unless a job of `size` ranks can measure this."""
        if self.collectives and size == 1:
            raise SharedJobError(
                "Received --collectives in a job of 1 rank; expected 2 or more: start "
                "it by horovodrun -np 2 or mpirun -np 2."
            )
        if self.compares_parallelism and size == 1:
            raise SharedJobError(
                f"Received --workload={self.workload} in a job of 1 rank; expected 2 "
                "or more, over which it is divided: start it by horovodrun -np 2 or "
                "mpirun -np 2."
            )
        if self.strategy != "horovod" and size > 1:
            raise SharedJobError(
                f"Received {size} ranks with --strategy={self.strategy}; expected one "
                "process: start python -m hvdtrain.benchmark without a launcher."
            )
        if self.strategy == "mirrored" and self.steps_per_execution > 1:
            raise SharedJobError(
                f"Received --steps_per_execution={self.steps_per_execution} with "
                "--strategy=mirrored; expected 1, as Keras' fit fails with more under "
                "MirroredStrategy."
            )

    @property
    def compares_parallelism(self):
        """Whether kinds of parallelism are compared, instead of a training's parts."""
        return self.workload in OF_PARALLELISM and not self.collectives

    def mesh_shape(self, size):
        """Return the shape of the mesh for which `job.start` makes process sets."""
        needs_stages = self.compares_parallelism and self.workload == "wide"
        return MeshShape(pipeline=size) if needs_stages else None

    @property
    def table_rows(self):
        """The rows of each embedding table."""
        return [int(rows) for rows in self.tables]

    @property
    def message_sizes(self):
        """The bytes of the messages of --collectives: 1 kB, 4 kB, ..., and the largest.

        Multiples of 4, the bytes of a float32.
        """
        sizes, last = [_FIRST_BYTES], self.max_bytes // 4 * 4
        while sizes[-1] * _FACTOR < last:
            sizes.append(sizes[-1] * _FACTOR)
        return [*sizes, last]


def is_workload(text):
    """Whether `text` is the name of a workload or of the form `module:function`."""
    return text in WORKLOADS or bool(_FUNCTION.fullmatch(text))
