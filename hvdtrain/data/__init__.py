"""Data: the images, and which rank sees which of them at which step.

A job does, in this order::

    dataset, warning = loading.load_everywhere(world, "auto")
    sampler = data.Sampler(num_samples=len(dataset.x_train), ...)
    x, y = dataset.x_train, dataset.y_train
    batches = streams.train_batches(x, y, sampler=sampler, ...)

Rank and size are arguments. `streams` (tf.data) and `loading` (collectives) load
TensorFlow and are imported by name; importing this package loads NumPy only.
"""

from hvdtrain import renamed
from hvdtrain.data.datasets import NAMES, Choice, Dataset, agree, load, prepare
from hvdtrain.data.download import cached_mnist, default_cache_dir
from hvdtrain.data.formats import DataError
from hvdtrain.data.sampler import Sampler

__getattr__ = renamed.getattr_of(__name__, {"Shard": "Sampler"})
