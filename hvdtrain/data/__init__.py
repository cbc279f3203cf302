"""Data: sources of samples, and which rank sees which of them at which step.

A job of `training.fit` needs a source alone. Others do, in this order::

    sampler = data.Sampler(num_samples=len(source), ...)
    batches = data.batches(source, sampler, start_step, end_step)

Rank and size are arguments. Importing this package loads NumPy only: `batches`, the
sources and `loading` (collectives) load TensorFlow or a library for their format when
they are first used.
"""

from typing import TYPE_CHECKING

from hvdtrain import lazy
from hvdtrain.data.datasets import NAMES, Choice, Dataset, agree, load, prepare
from hvdtrain.data.download import cached_mnist, default_cache_dir
from hvdtrain.data.formats import DataError
from hvdtrain.data.sampler import Sampler
from hvdtrain.data.sources.source import Source

if TYPE_CHECKING:
    from hvdtrain.data.batching import batches, one_pass
    from hvdtrain.data.sources.arrayrecord import ArrayRecord
    from hvdtrain.data.sources.image_folder import ImageFolder
    from hvdtrain.data.sources.mixture import mix
    from hvdtrain.data.sources.packed import pack
    from hvdtrain.data.sources.padded import pad
    from hvdtrain.data.sources.parquet import Parquet
    from hvdtrain.data.sources.source import map_samples
    from hvdtrain.data.sources.tfrecord import TFRecord

_MODULES = {
    **dict.fromkeys(("batches", "one_pass"), "batching"),
    "map_samples": "sources.source",
    "ImageFolder": "sources.image_folder",
    "Parquet": "sources.parquet",
    "mix": "sources.mixture",
    "pack": "sources.packed",
    "pad": "sources.padded",
    "ArrayRecord": "sources.arrayrecord",
    "TFRecord": "sources.tfrecord",
}
__all__ = [
    *("NAMES", "Choice", "DataError", "Dataset", "Sampler", "Source"),
    *("agree", "cached_mnist", "default_cache_dir", "load", "prepare"),
    *_MODULES,
]
__getattr__ = lazy.getattr_of(__name__, _MODULES)
