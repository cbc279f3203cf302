"""The events of a run, which a training passes to its observers."""

import dataclasses
import math

# The cause of a delay that no other cause explains.
OTHER = "other"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunStart:
    """The start of a run of a job, at `step`: 0 for a new job.

    Attributes:
        global_batch_size: samples of a step of the whole job.
        local_batch_sizes: samples in a batch of each replica of the model.
        accumulation_steps: steps for one update of the weights.
        learning_rate: the optimizer's, before callbacks change it.
        model: name of the model.
        optimizer: name of the optimizer.
        mesh: number of ranks along each axis: data, pipeline, model.
        reduction: how dense gradients are summed over the ranks.
        controller: "MPI" or "Gloo", which starts Horovod's collectives.
        hosts: name of the node of each rank.
        threads: number of TensorFlow's threads of each rank, 0 for one per core.
        versions: by name of the package.
        cpu_quota: of the chief's control groups, such as "1.5 of 16 cores"; empty for
            none.
        compiles_gradients: whether XLA compiles forward and backward pass.
        checkpoint: from which the run continues: its path, or a text for one in memory.
            Empty for a new job.
        replicas_before: of the model, that wrote this checkpoint.
        process_seconds: since the start of the chief's process.
    """

    step: int
    max_steps: int
    ranks: int
    global_batch_size: int
    local_batch_sizes: list[int]
    accumulation_steps: int
    learning_rate: float
    model: str
    optimizer: str
    mesh: dict[str, int]
    reduction: str
    controller: str
    hosts: list[str]
    threads: list[int]
    versions: dict[str, str]
    cpu_quota: str = ""
    compiles_gradients: bool = False
    checkpoint: str = ""
    replicas_before: int | None = None
    process_seconds: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunEnd:
    """The end of a run that was neither stopped nor killed.

    Attributes:
        evaluation_seconds: of the chief, since the last report of progress. NaN without
            the native library.
        saving_seconds: in which training stopped for checkpoints, in the same time.
    """

    step: int
    evaluation_seconds: float
    saving_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Straggler:
    """The rank that has delayed the others most since the last report.

    A rank is late by the time from the median arrival of the others to its arrival. It
    is late in the collectives in which it is the last.

    Attributes:
        rank: the late rank.
        host: name of its node.
        last_share: share of the collectives in which it arrived last.
        late_seconds: in each step.
        delay: share of the time by which it was late.
        delay_by_cause: `delay`, by what took longer on this rank than on the median of
            the others: names of `stragglers.CAUSES`, and "other". Without zeros.
        cause: the largest of `delay_by_cause`.
        cause_seconds: of this rank in each step. NaN for "other".
        others_seconds: the median of the others.
        waiting: share of the time in which ranks waited for the last one, the mean over
            the ranks. Other ranks than this one may have been the last.
        late_seconds_by_rank: in each step, after the first rank.
    """

    rank: int
    host: str
    last_share: float
    late_seconds: float
    delay: float
    delay_by_cause: dict[str, float]
    cause: str
    cause_seconds: float
    others_seconds: float
    waiting: float
    late_seconds_by_rank: list[float]

    def __str__(self) -> str:
        delay = f"{100 * self.delay:.0f} %"
        text = f"rank {self.rank} on {self.host} delays the others by {delay}"
        if self.cause == OTHER:
            return text
        verb = "take" if self.cause == "callbacks" else "takes"
        return (
            f"{text}: its {self.cause} {verb} {_milliseconds(self.cause_seconds)} a "
            f"step, theirs {_milliseconds(self.others_seconds)}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """The state of the training of the whole job.

    Attributes:
        epoch: from 1 on.
        metrics: results by name, over all ranks and the steps since the last report of
            the epoch. A user's metric with states of its own is over the steps since
            the epoch began.
        learning_rate: at this step; if a schedule of Keras computes it, at the next.
        communication: share of the time since the last report that ranks spent in
            collectives, with the wait for the other ranks: the mean over the ranks.
            Their computation may go on meanwhile. NaN on one rank, and without the
            native library.
        input_wait: share of the same time in which ranks waited for a batch: the mean
            over the ranks. NaN without the native library.
        samples_per_second: of all ranks since the last report.
        skipped_updates: updates of the job that were left out, since their gradients
            were not finite.
        straggler: the rank that has delayed the others most since the last report. None
            on one rank, and where arrivals at collectives are not measured.
        evaluation_seconds: of the chief, since the last report. NaN without the native
            library.
        saving_seconds: in which training stopped for checkpoints, in the same time.
    """

    step: int
    max_steps: int
    epoch: int
    epochs: int
    metrics: dict[str, float]
    learning_rate: float
    communication: float
    input_wait: float
    samples_per_second: float
    seconds_left: float
    skipped_updates: int = 0
    straggler: Straggler | None = None
    evaluation_seconds: float = math.nan
    saving_seconds: float = math.nan


def _milliseconds(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:,.0f} ms" if value >= 10 else f"{value:.2g} ms"
