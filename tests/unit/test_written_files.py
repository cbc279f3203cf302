"""Which files the callbacks of Keras write: several ranks must not write one."""

import inspect

import keras
import pytest

from hvdtrain.keras.callbacks.fit_start import WRITERS, written_paths, written_twice

# Arguments of a callback that name a place.
PLACES = ("file", "dir", "path")
# RemoteMonitor has a path of a URL; the names of TensorBoard's files have the process.
OTHERS = {keras.callbacks.RemoteMonitor, keras.callbacks.TensorBoard}


def test_each_callback_of_keras_that_writes_files_is_known():
    classes = filter(inspect.isclass, vars(keras.callbacks).values())
    writers = {
        each
        for each in classes
        if any(p in name for p in PLACES for name in inspect.signature(each).parameters)
        if each not in OTHERS
    }
    assert writers == set(WRITERS)


@pytest.mark.parametrize(
    ("paths", "text"),
    [
        ([["a", "b"], ["c"], []], ""),
        ([["a", "b"], ["b"], []], "CSVLogger with /b on ranks 0, 1."),
        ([[], ["s3://a"], ["s3://a"]], "CSVLogger with s3://a on ranks 1, 2."),
    ],
)
def test_files_of_several_ranks_are_named(monkeypatch, paths, text):
    monkeypatch.chdir("/")
    by_rank = [
        written_paths(map(keras.callbacks.CSVLogger, each), keras.Sequential())
        for each in paths
    ]
    assert text in written_twice(by_rank, ranks=range(3))
    assert bool(text) == bool(written_twice(by_rank, ranks=range(3)))
