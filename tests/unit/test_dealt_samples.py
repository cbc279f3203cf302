"""How `fit` deals samples: batches of the training and of the evaluation."""

import numpy as np

from hvdtrain.data.sources.source import as_source
from hvdtrain.job import World
from hvdtrain.parallel.replicas import Replicas
from hvdtrain.training import Position, elastic
from hvdtrain.training.dealt_samples import DealtSamples

NUMBERS = np.arange(10)


def samples(**changes):
    values = {
        "source": as_source(NUMBERS),
        "validation": as_source(NUMBERS),
        "global_batch_size": lambda ranks: 3 * ranks,
        "epochs": None,
        "max_steps": lambda ranks: 12 // ranks,
        "validation_batch_size": None,
        "seed": 0,
        "scale_batch": False,
        "transform": None,
        "workers": None,
    }
    return DealtSamples(**(values | changes))


def evaluated(dealt, **options):
    spec = dealt.eval_spec(Replicas.of(World()), local_batch_size=3, **options)
    return [len(batch) for batch in spec.batches()]


def test_batches_of_an_evaluation():
    assert evaluated(samples()) == [3, 3, 3, 1]
    assert evaluated(samples(validation_batch_size=8)) == [8, 2]


def test_sizes_of_the_first_ranks():
    """A job of one rank, which two have started."""
    first = Position(step=4, sample=24, original_size=2)
    kept = samples().train_spec(Replicas.of(World()), first, {})
    assert (kept.local_batch_size, kept.max_steps, kept.scale_from) == (6, 6, None)
    # Two steps of 6 samples are left, which one rank takes in four.
    scaled = samples(scale_batch=True).train_spec(Replicas.of(World()), first, {})
    assert (scaled.local_batch_size, scaled.max_steps) == (3, 8)
    assert scaled.scale_from == first


def test_a_job_without_a_commit_takes_the_sizes_of_its_present_ranks(monkeypatch):
    """As after the loss of a rank before its first step: two have started it."""
    monkeypatch.setattr(elastic, "is_elastic", lambda: True)
    monkeypatch.setattr(elastic.hvd.elastic, "run", lambda function: function)
    monkeypatch.setattr(elastic.backend, "world", World)
    sizes = []
    elastic.run_elastic(
        lambda world, commits: sizes.append(commits.original_size), World(size=2)
    )
    assert sizes == [1]
