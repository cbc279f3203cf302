"""Old names of public modules and their contents work, and warn."""

import importlib

import pytest

from hvdtrain import data, renamed
from hvdtrain.job.world import MeshShape


@pytest.mark.parametrize("old", sorted(renamed.MODULES))
def test_an_old_module_has_the_contents_of_the_new_one(old):
    with pytest.warns(DeprecationWarning, match=f"^{old} is deprecated.* Use hvdtrain"):
        module = importlib.reload(importlib.import_module(old))
    for new in renamed.MODULES[old]:
        names = {n for n in vars(importlib.import_module(new)) if n[:2] != "__"}
        assert names <= set(vars(module))


def test_an_old_module_has_the_same_class():
    with pytest.warns(DeprecationWarning, match="Use hvdtrain.job.world"):
        module = importlib.reload(importlib.import_module("hvdtrain.job.mesh_shape"))
    assert module.MeshShape is MeshShape


def test_an_old_name_is_the_new_one():
    with pytest.warns(DeprecationWarning, match=r"data\.Shard .* Use .*data\.Sampler"):
        assert data.Shard is data.Sampler
    with pytest.raises(AttributeError, match="no attribute 'Shards'"):
        data.Shards  # noqa: B018
