"""The bytes of objects that ranks send: signed, or a failure."""

import pathlib
import pickle
import threading

import pytest

from hvdtrain.collectives import pickles

SECRET, OTHER = "ab" * 32, "cd" * 32


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv("HOROVOD_JOB_SECRET", SECRET)


def dumps(obj, *, sender=1, operation="allgather_object"):
    return pickles.dumps(obj, sender=sender, operation=operation)[0]


def loads(data, *, sender=1, operation="allgather_object"):
    return pickles.loads(data, sender=sender, operation=operation)


@pytest.mark.parametrize("obj", [None, b"", "text", {"a": [1, 2.5]}])
def test_an_object_arrives(obj, monkeypatch):
    signed = dumps(obj)
    assert loads(signed) == obj
    monkeypatch.delenv("HOROVOD_JOB_SECRET")
    assert loads(dumps(obj)) == obj
    # HMAC-SHA256.
    assert len(signed) == len(dumps(obj)) + 32


class Attack:
    """Writes a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


@pytest.mark.parametrize(
    "send",
    [
        lambda obj, signed, _: pickle.dumps(obj),
        lambda obj, signed, _: signed[:32] + pickle.dumps(obj),
        lambda obj, signed, _: bytes(32) + pickle.dumps(obj),
        lambda obj, signed, _: signed[:20],
        lambda obj, signed, _: dumps(obj, sender=0),
        lambda obj, signed, _: dumps(obj, operation="gather_object"),
        lambda obj, signed, monkeypatch: dumps_with(OTHER, obj, monkeypatch),
    ],
    ids=["none", "others", "zeros", "short", "sender", "operation", "secret"],
)
def test_nothing_without_the_signature_is_unpickled(send, tmp_path, monkeypatch):
    attack = Attack(tmp_path / "attacked")
    data = send(attack, dumps("an object"), monkeypatch)
    with pytest.raises(
        RuntimeError,
        match=r"^allgather_object: received an object that rank 1 has not signed",
    ):
        loads(data)
    assert not attack.path.exists()
    # The attack is one.
    loads(dumps(attack))
    assert attack.path.exists()


def dumps_with(secret, obj, monkeypatch):
    with monkeypatch.context() as context:
        context.setenv("HOROVOD_JOB_SECRET", secret)
        return dumps(obj)


def test_an_object_that_cannot_be_pickled_is_an_error_of_the_receiver():
    data, is_pickled = pickles.dumps(
        [threading.Lock()], sender=1, operation="allgather_object"
    )
    assert not is_pickled
    with pytest.raises(
        pickle.PicklingError,
        match=r"^allgather_object: rank 1 cannot pickle its object: .*_thread.lock",
    ):
        loads(data)
