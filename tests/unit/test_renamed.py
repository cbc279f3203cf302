"""Old names of modules, their contents and keywords work, and warn."""

import importlib

import numpy as np
import pytest

from hvdtrain import data, renamed
from hvdtrain.classifier.options import ClassifierOptions
from hvdtrain.data import streams
from hvdtrain.job.world import MeshShape


@pytest.mark.parametrize("old", sorted(renamed.MODULES))
def test_an_old_module_has_the_contents_of_the_new_one(old):
    with pytest.warns(DeprecationWarning, match=f"^{old} is deprecated.* Use hvdtrain"):
        module = importlib.reload(importlib.import_module(old))
    for new in renamed.MODULES[old]:
        names = {n for n in vars(importlib.import_module(new)) if n[:2] != "__"}
        assert names <= set(vars(module))


@pytest.mark.parametrize(
    ("old", "name", "new"),
    [
        ("data.sharding", "Shard", "Sampler"),
        ("training.image_classifier", "Run", "Experiment"),
        ("training.options", "Options", "ClassifierOptions"),
    ],
)
def test_an_old_module_has_its_old_names(old, name, new):
    def load():
        module = importlib.reload(importlib.import_module(f"hvdtrain.{old}"))
        return getattr(module, name)

    with pytest.warns(DeprecationWarning, match="is deprecated"):
        found = load()
    assert found.__name__ == new


def test_an_old_module_has_the_same_class():
    with pytest.warns(DeprecationWarning, match="Use hvdtrain.job.world"):
        module = importlib.reload(importlib.import_module("hvdtrain.job.mesh_shape"))
    assert module.MeshShape is MeshShape


def test_an_old_keyword_is_the_new_one():
    x, y = np.zeros((4, 2, 2, 1), np.uint8), np.zeros(4, np.int32)
    sampler = data.Sampler(num_samples=4, global_batch_size=2, seed=0)
    with pytest.warns(DeprecationWarning, match=r"train_batches\(shard=\).*sampler="):
        batches = streams.train_batches(x, y, shard=sampler, start_step=0, end_step=2)
    assert len(batches) == 2


def test_an_old_module_has_old_names_of_its_contents():
    old = "hvdtrain.training.options"
    with pytest.warns(DeprecationWarning, match=f"{old} is deprecated"):
        module = importlib.reload(importlib.import_module(old))
    with pytest.warns(DeprecationWarning, match=r"Use .*options\.ClassifierOptions"):
        assert module.Options is ClassifierOptions


def test_an_old_name_is_the_new_one():
    with pytest.warns(DeprecationWarning, match=r"data\.Shard .* Use .*data\.Sampler"):
        assert data.Shard is data.Sampler
    with pytest.raises(AttributeError, match="no attribute 'Shards'"):
        data.Shards  # noqa: B018
