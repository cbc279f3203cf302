"""Training that goes on when workers are lost, and when new workers arrive.

The launcher, `horovodrun --min-np ... --host-discovery-script ...`, starts the workers.
The state of the job is copied into the memory of every rank. When a worker is lost, the
others form a new job, and continue from the newest copy.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import horovod.tensorflow as horovod
from horovod.common.elastic import State

import hvdtrain.keras as hvd
from hvdtrain.checkpoint.header import Checkpoint, Header
from hvdtrain.checkpoint.writing import Writer
from hvdtrain.collectives.objects import broadcast_object
from hvdtrain.collectives.process_sets import is_elastic
from hvdtrain.job import World, backend
from hvdtrain.training.due import Requests

Returned = TypeVar("Returned")


class Commits:
    """The newest state of the job, in the memory of this rank.

    It has the reading methods of `CheckpointFiles`, and `submit` of the writer.

    Attributes:
        original_size: number of replicas at the start, or at the last change before
            the first commit: until then nothing was trained.
        requests: the requests of this rank, which outlive a change of the job.
        writer: of the last run on the chief; None on other ranks.
    """

    def __init__(self, size: int) -> None:
        self.original_size = size
        self.requests = Requests()
        self.writer: Writer | None = None
        self._newest: list[Checkpoint] = []
        self._state = _HostUpdates()

    def steps(self) -> list[int]:
        return [checkpoint.step for checkpoint in self._newest]

    def read(self, step: int) -> Checkpoint:
        return self._newest[0]

    def header(self, step: int) -> Header:
        return self._newest[0].header

    verify = header

    def path(self, step: int) -> str:
        return f"the commit of step {step}"

    def prepare(self) -> None:
        """Do nothing: commits end with their process."""

    def supersede_after(self, step: int) -> None:
        """Do nothing: the next commit replaces this one."""

    def submit(
        self,
        checkpoint: Checkpoint,
        *,
        copy_seconds: float,
        is_reported: bool = True,
        is_last: bool = False,
    ) -> None:
        """Keep a checkpoint, then leave the training if hosts have come or gone.

        A collective: all ranks leave the training at the same step.
        """
        self._newest = [checkpoint]
        self._state.check_host_updates()


class _HostUpdates(State):
    """Receives the launcher's messages. Saves nothing: `Commits` holds the state."""

    def __init__(self) -> None:
        super().__init__(
            bcast_object=lambda values: broadcast_object(values, name="HostUpdates"),
            get_rank=horovod.rank,
        )

    def save(self) -> None: ...

    def restore(self) -> None: ...

    def sync(self) -> None: ...


def run_elastic(
    train: Callable[[World, Commits | None], Returned], world: World
) -> Returned:
    """Call `train(world, commits)`; in an elastic job again after each change of it.

    In other jobs it is called once, with None as `commits`.

    Args:
        train: loads the data, builds the model, calls `train_and_evaluate(...,
            commits=commits)`, and returns what `run_elastic` is to return. Nothing
            before it may call a collective: a worker that joins later begins here.
    """
    if not is_elastic():
        return train(world, None)
    commits = Commits(world.size)

    @hvd.elastic.run
    def run(state: State) -> Returned:
        if not commits.steps():
            commits.original_size = backend.world().size
        return train(dataclasses.replace(backend.world(), seed=world.seed), commits)

    return run(commits._state)
