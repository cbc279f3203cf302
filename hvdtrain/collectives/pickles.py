"""Objects of ranks as bytes, which are signed where the job has a secret.

Loading a pickle can execute any code. Connections of ranks have no authentication, but
a process that is not of the job does not have the secret.
"""

import hmac
import pickle
from collections.abc import Iterable
from typing import Any, NamedTuple

import cloudpickle

from hvdtrain import environment

_HASH = "sha256"
_SIGNATURE_BYTES = 32
# Received bytes may be padded to words: a pickle has its own end.
_WORD_BYTES = 8


class _Failure(NamedTuple):
    """Sent in place of an object that cannot be pickled."""

    reason: str


def dumps(obj: object, *, sender: int, operation: str) -> tuple[bytes, bool]:
    """Return bytes for `loads`, and whether `obj` can be pickled.

    If it cannot, the bytes let `loads` raise this error on the ranks that receive them.
    """
    try:
        data = cloudpickle.dumps(obj)
    except Exception as error:
        data = cloudpickle.dumps(_Failure(f"{type(error).__name__}: {error}"))
        return _sign(data, sender, operation), False
    return _sign(data, sender, operation), True


def loads(data: bytes, *, sender: int, operation: str) -> Any:
    """Return the object that `sender` has given to this operation.

    Args:
        data: result of `dumps` with the same `sender` and `operation`.
        sender: rank among those that take part.

    Raises:
        RuntimeError: the signature is not the sender's; nothing was unpickled.
        pickle.PicklingError: the sender cannot pickle its object.
    """
    obj = pickle.loads(_check(data, sender, operation))
    if isinstance(obj, _Failure):
        raise pickle.PicklingError(
            f"{operation}: rank {sender} cannot pickle its object: {obj.reason}"
        )
    return obj


def _sign(data: bytes, sender: int, operation: str) -> bytes:
    padding = bytes(-len(data) % _WORD_BYTES)
    return b"".join([_signature([data, padding], sender, operation), data, padding])


def _check(data: bytes, sender: int, operation: str) -> memoryview:
    size = _SIGNATURE_BYTES if environment.job_secret() else 0
    received, content = data[:size], memoryview(data)[size:]
    if not hmac.compare_digest(received, _signature([content], sender, operation)):
        raise RuntimeError(
            f"{operation}: received an object that rank {sender} has not signed with "
            f"{environment.JOB_SECRET} of this job. A process that is not of the job "
            "has sent it, or the ranks have different secrets."
        )
    return content


def _signature(
    content: Iterable[bytes | memoryview], sender: int, operation: str
) -> bytes:
    secret = environment.job_secret()
    if not secret:
        return b""
    # With both: an object of another rank or operation is not accepted.
    context = f"object {operation} {sender} ".encode()
    signature = hmac.new(secret, context, _HASH)
    for part in content:
        signature.update(part)
    return signature.digest()
