"""Training that goes on when workers are lost, and takes up new ones.

The launcher, `horovodrun --min-np ... --host-discovery-script ...`, starts and places
workers. The state of the job is copied into the memory of every rank; when a worker is
lost, the others form a new job, and continue from the newest copy.
"""

import horovod.tensorflow as horovod
from horovod.common.elastic import State

import hvdtrain.keras as hvd
from hvdtrain.collectives.objects import broadcast_object
from hvdtrain.collectives.process_sets import is_elastic
from hvdtrain.job import backend
from hvdtrain.training.checkpoint.storage import Checkpoint
from hvdtrain.training.requests import Requests


class Commits:
    """The newest state of the job, in the memory of this rank.

    It has the methods of `CheckpointFiles` that reading takes, and `submit` of the
    writer.

    Args:
        size: number of ranks at the start.

    Attributes:
        original_size: number of ranks at the start.
        requests: the `Requests` of this rank, which outlive a change of the job.
        writer: the `BackgroundWriter` of the last run on this rank; None elsewhere.
    """

    def __init__(self, size):
        self.original_size = size
        self.requests = Requests()
        self.writer = None
        self._newest = None
        self._state = _HostUpdates()

    def steps(self):
        """Return the step of the newest commit, as a list."""
        return [] if self._newest is None else [self._newest.step]

    def read(self, step):
        """Return the newest commit, a `Checkpoint`."""
        return self._newest

    def verify(self, step: int) -> dict:
        """Return its metadata."""
        return self._newest.metadata

    def path(self, step):
        """Return what an error calls it."""
        return f"the commit of step {step}"

    def delete_leftovers(self):
        """Do nothing: no process leaves any."""

    def supersede_after(self, step):
        """Do nothing: the next commit replaces this one."""

    def submit(
        self, checkpoint: Checkpoint, *, copy_seconds: float, is_reported: bool = True
    ) -> None:
        """Keep a `Checkpoint`, then leave the training if hosts have come or gone.

        A collective: all ranks leave it at the same step. Nothing is reported.
        """
        self._newest = checkpoint
        self._state.check_host_updates()

    @property
    def has_host_updates(self):
        """Whether the launcher has announced hosts since the last commit."""
        return not self._state._host_messages.empty()


class _HostUpdates(State):
    """Receives the launcher's messages; what it would save is in `Commits`."""

    def __init__(self):
        super().__init__(
            bcast_object=lambda values: broadcast_object(values, name="HostUpdates"),
            get_rank=horovod.rank,
        )

    def save(self):
        """Do nothing."""

    def restore(self):
        """Do nothing."""

    def sync(self):
        """Do nothing."""


def run_elastic(train, world):
    """Call `train(world, commits)`; in an elastic job again after each change of it.

    In other jobs it is called once, with None as `commits`.

    Args:
        train: a function that loads the data, builds the model and calls
            `train_and_evaluate(..., commits=commits)`. Nothing before it may call a
            collective: a worker that joins later begins with `train`.
        world: the `World` at the start.

    Returns:
        What `train` returns.
    """
    if not is_elastic():
        return train(world, None)
    commits = Commits(world.size)

    @hvd.elastic.run
    def run(state):
        return train(backend.world(), commits)

    return run(commits._state)
