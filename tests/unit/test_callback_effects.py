"""What Keras' callbacks do, of which some may not be on several ranks, or on one."""

import inspect
import re
import socket
import warnings

import keras
import pytest

from hvdtrain.keras.callbacks.effects import (
    EFFECTS,
    changing_callbacks,
    find_writers,
    warn_of_batch_logs,
    written_twice,
)

# Arguments of a callback that name a place.
PLACES = ("file", "dir", "path")
# RemoteMonitor has a path of a URL; the names of TensorBoard's files have the process.
OTHERS = {keras.callbacks.RemoteMonitor, keras.callbacks.TensorBoard}
BASES = {keras.callbacks.Callback, keras.callbacks.CallbackList}
CLASSES = {*filter(inspect.isclass, vars(keras.callbacks).values())} - BASES


def test_each_callback_of_keras_has_a_row():
    of_keras = {kind for kind in EFFECTS if kind.__module__.startswith("keras.")}
    assert of_keras == CLASSES


def test_each_callback_of_keras_that_writes_files_is_known():
    writers = {
        each
        for each in CLASSES - OTHERS
        if any(p in name for p in PLACES for name in inspect.signature(each).parameters)
    }
    assert writers == {kind for kind, effect in EFFECTS.items() if effect.path}


@pytest.mark.parametrize(
    ("words", "effect"),
    [
        (("stop_training = True",), "stops"),
        ((".learning_rate = ", ".assign(", "set_weights("), "changes"),
    ],
)
def test_each_callback_of_keras_that_changes_the_training_is_known(words, effect):
    # These restore weights at the end, or from a file.
    restoring = {keras.callbacks.EarlyStopping, keras.callbacks.BackupAndRestore}
    found = {
        each
        for each in CLASSES
        if any(word in inspect.getsource(each) for word in words)
        if effect == "stops" or each not in restoring
    }
    assert found == {kind for kind in CLASSES if getattr(EFFECTS[kind], effect)}


class Plateau(keras.callbacks.ReduceLROnPlateau):
    """Changes the rate as its base does."""


def test_callbacks_that_change_the_training_are_named():
    callbacks = [
        keras.callbacks.EarlyStopping(),
        Plateau(),
        keras.callbacks.CSVLogger("a"),
    ]
    assert changing_callbacks(callbacks, stops_together=True) == ["Plateau"]
    names = changing_callbacks(callbacks, stops_together=False)
    assert names == ["EarlyStopping", "Plateau"]


@pytest.mark.parametrize(
    ("kind", "options", "is_named"),
    [
        ("ModelCheckpoint", {"filepath": "a.keras", "save_freq": 1}, False),
        ("ModelCheckpoint", {"filepath": "{batch}.keras", "save_freq": 1}, False),
        ("ModelCheckpoint", {"filepath": "{loss:.2f}.keras", "save_freq": 1}, True),
        ("ModelCheckpoint", {"filepath": "{loss:.2f}.keras"}, False),
        (
            "ModelCheckpoint",
            {"filepath": "a.keras", "save_freq": 1, "save_best_only": True},
            True,
        ),
        ("TensorBoard", {"update_freq": "batch"}, True),
        ("TensorBoard", {}, False),
    ],
)
def test_callbacks_that_decide_by_logs_of_batches_are_named(kind, options, is_named):
    callback = getattr(keras.callbacks, kind)(**options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_batch_logs([callback, keras.callbacks.History()])
    texts = [str(each.message) for each in caught]
    named = [re.search(r"use the former: (\w+)\. Pass", text)[1] for text in texts]
    assert named == [kind] * is_named


@pytest.mark.parametrize(
    ("paths", "hosts", "text"),
    [
        ([["a", "b"], ["c"], []], "000", ""),
        ([["a", "b"], ["b"], []], "000", "CSVLogger with /b on ranks 0, 1."),
        ([[], ["s3://a"], ["s3://a"]], "012", "CSVLogger with s3://a on ranks 1, 2."),
        # Each host may have a disk of its own.
        ([["a"], ["a"], []], "010", ""),
        ([["a"], ["a"], ["a"]], "011", "CSVLogger with /a on ranks 1, 2."),
        ([["/dev/null"], ["/dev/null"], []], "000", ""),
    ],
)
def test_files_of_several_ranks_are_named(monkeypatch, paths, hosts, text):
    monkeypatch.chdir("/")
    by_rank = []
    for names, host in zip(paths, hosts, strict=True):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        loggers = map(keras.callbacks.CSVLogger, names)
        by_rank.append(find_writers(loggers, keras.Sequential()))
    found = written_twice(by_rank, ranks=range(3))
    assert text in found
    assert bool(text) == bool(found)
