"""Data: where the images come from, and which rank sees which of them when.

A job does, in this order::

    choice = data.prepare("auto")          # local rank 0 of each node only
    choice = data.agree(choices)           # of all nodes, gathered by the caller
    dataset = data.load(choice.name)       # every rank
    shard = data.Shard(num_samples=len(dataset.x_train), ...)
    batches = data.stream(dataset.x_train, dataset.y_train, shard=shard, ...)

Nothing here knows Horovod: rank and size are arguments.
"""

from hvdtrain.data.datasets import NAMES, Choice, Dataset, agree, load, prepare
from hvdtrain.data.download import default_cache_dir, download_mnist
from hvdtrain.data.files import DataError
from hvdtrain.data.sharding import Shard, evaluation_stream, stream

__all__ = [
    "NAMES",
    "Choice",
    "DataError",
    "Dataset",
    "Shard",
    "agree",
    "default_cache_dir",
    "download_mnist",
    "evaluation_stream",
    "load",
    "prepare",
    "stream",
]
