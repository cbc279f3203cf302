"""What all ranks of a job read together, step by step."""

import itertools

from hvdtrain import data


def by_step(source, make_sampler, steps, *, size, ids_of, **options):
    """Return the sorted ids of each step, over all ranks.

    Args:
        make_sampler: returns the sampler of a rank, with `rank=` and `size=`.
        steps: a range.
        ids_of: returns the ids of a batch of arrays, as a list.
        options: of `data.batches`.
    """
    ranks = []
    for rank in range(size):
        sampler = make_sampler(rank=rank, size=size)
        batches = data.batches(source, sampler, steps.start, steps.stop, **options)
        assert batches.cardinality() == len(steps)
        ranks.append([ids_of(batch) for batch in batches.as_numpy_iterator()])
    return [sorted(itertools.chain(*parts)) for parts in zip(*ranks, strict=True)]
