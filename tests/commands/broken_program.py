"""A program with a bug that shows on one rank, while the others wait for it.

horovodrun -np 2 python tests/commands/broken_program.py --on_rank=1
"""

from absl import flags

from hvdtrain import job, program

_ON_RANK = flags.DEFINE_integer("on_rank", 0, "The rank that raises.")


def main():
    world = job.start()
    import hvdtrain.keras as hvd

    hvd.allreduce(1.0, name="all_ranks")
    if world.rank == _ON_RANK.value:
        raise KeyError("a bug on purpose")
    hvd.allreduce(1.0, name="others_only")


if __name__ == "__main__":
    program.run(main, page=__doc__)
