"""A program that fails on one rank while the others are blocked in a collective.

horovodrun -np 2 python tests/commands/broken_program.py --on_rank=1
"""

from absl import flags

from hvdtrain import job, program
from hvdtrain.job import JobError

_ON_RANK = flags.DEFINE_integer("on_rank", 0, "The rank that raises.")
_ERROR = flags.DEFINE_enum("error", "bug", ("bug", "mistake"), "What it raises.")
_ERRORS = {
    "bug": KeyError("a bug on purpose"),
    "mistake": JobError("a mistake on purpose"),
}


def main():
    world = job.start()
    import hvdtrain.keras as hvd

    hvd.allreduce(1.0, name="all_ranks")
    if world.rank == _ON_RANK.value:
        raise _ERRORS[_ERROR.value]
    hvd.allreduce(1.0, name="others_only")


if __name__ == "__main__":
    program.run(main, page=__doc__)
