"""The position of a process in its job, and the error that ends a job."""

import dataclasses


class JobError(Exception):
    """The job cannot continue. The message is one line: the reason and the remedy."""

    exit_code = 1


class SharedJobError(JobError):
    """A `JobError` that is raised on every rank alike: rank 0 alone prints it."""


class PreemptedError(SharedJobError):
    """The job was asked to stop, and is to be started again to continue.

    Its exit code is EX_TEMPFAIL of sysexits.h, on which schedulers can requeue.
    """

    exit_code = 75


@dataclasses.dataclass(frozen=True)
class World:
    """The position of this process in the job.

    Attributes:
        rank: number of this process in the job, from 0.
        size: number of processes in the job.
        local_rank: number of this process on its node, from 0.
        local_size: number of processes on this node.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def is_chief(self):
        """Whether this is the rank that prints and writes files."""
        return self.rank == 0
