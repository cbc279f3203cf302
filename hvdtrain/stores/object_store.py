"""A directory of an object store: whole objects, each operation retried."""

import contextlib
import errno
import importlib
import pathlib
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from hvdtrain.job import JobError

# fsspec's packages by the scheme of an address, and the extras that install them.
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
# fsspec repeats a request by itself; these pauses outlast an outage of some seconds.
_RETRY_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)
# A repetition has the same result.
_NOT_RETRIED = (
    FileExistsError,
    FileNotFoundError,
    PermissionError,
    NotImplementedError,
)

# Libraries of fsspec's packages, and of what these import.
_PROVIDERS = {"adlfs", "aiobotocore", "azure", "botocore", "gcsfs", "google", "s3fs"}
_random = random.Random()

_Value = TypeVar("_Value")


class StoreError(JobError):
    """A store that could not be used; the message has the address and the reason."""


class DeletionDeniedError(StoreError):
    """A store whose user may not delete: a policy, or a retention lock."""


def open_filesystem(address: str) -> tuple[Any, str]:
    """Return fsspec's file system of an address, and the path in it.

    Options, such as endpoints and credentials, come from fsspec's configuration and
    from the variables of the provider's own library.

    Raises:
        StoreError: a package is missing, or the address or its options are wrong.
    """
    scheme = address.partition(":")[0]
    try:
        url_to_fs = importlib.import_module("fsspec.core").url_to_fs
        filesystem, path = url_to_fs(address)
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        reason = str(error).splitlines()[0]
        remedy = f"'hvdtrain[{extra}]'" if extra else "its package"
        raise StoreError(
            f"Cannot open {address}: {reason}; pip install {remedy}."
        ) from None
    except Exception as error:
        raise StoreError(
            f"Cannot open {address}: {reason_of(error)}; expected an address such as "
            "s3://bucket/run, of a file system that fsspec knows."
        ) from None
    _separate_random()
    return filesystem, path.rstrip("/")


def _separate_random() -> None:
    """Give the providers' libraries a generator of random numbers of their own.

    They draw pauses between repetitions. From Python's global generator, whose state
    is in checkpoints, a training would draw other numbers after a failed request.
    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _PROVIDERS:
            # None in place of a module that must not be imported.
            names = getattr(module, "__dict__", {})
            if names.get("random") is random:
                names["random"] = _random


def reason_of(error: BaseException) -> str:
    """Return the first line of an error, with its type where the text is short."""
    lines = str(error).strip().splitlines()
    name = type(error).__name__
    return f"{name}: {lines[0]}" if lines else name


def retried(
    call: Callable[[], _Value],
    *,
    pauses: Sequence[float] | None = None,
    sleep: Callable[[float], object] = time.sleep,
) -> _Value:
    """Return `call()`, repeated for some 15 seconds after errors that may be temporary.

    The last error is raised, which may have a class of the provider's library.

    Args:
        pauses: seconds before each repetition.
    """
    for seconds in _RETRY_SECONDS if pauses is None else pauses:
        try:
            return call()
        except _NOT_RETRIED:
            raise
        except Exception as error:
            if getattr(error, "errno", None) == errno.ENOSPC:
                raise
        sleep(seconds)
    return call()


def _check_address(address: str) -> None:
    scheme, _, path = address.partition("://")
    # Stores differ in whether they list names with empty parts. A chain has a cache of
    # its own. file://a/b has the host a, and is a relative path for fsspec.
    if "//" in path or "::" in address or scheme in ("file", "local"):
        raise StoreError(
            f"Received {address}; expected the address of one store without empty "
            "parts, such as s3://bucket/run, or a path."
        )


class ObjectStore:
    """The objects below an address, by their names relative to it.

    An object is written as a whole: a reader sees the old one or the new one. Errors
    that may be temporary are retried, for some 15 seconds in all.

    Args:
        address: such as "s3://bucket/run".
        pauses: see `retried`.
    """

    def __init__(
        self,
        address: str,
        *,
        pauses: Sequence[float] | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.address = address.rstrip("/")
        _check_address(self.address)
        self._fs, self._root = open_filesystem(self.address)
        self._pauses = pauses
        self._sleep = sleep

    def __str__(self) -> str:
        return self.address

    def sizes(self, prefix: str = "", *, depth: int | None = None) -> dict[str, int]:
        """Return the sizes of the objects below `prefix`, a directory, by name.

        A `depth` of 1 leaves out those in directories below it.

        A store may list an object late, or list it after it was deleted.
        """

        def find() -> dict[str, int]:
            self._fs.invalidate_cache()
            found = self._fs.find(self._path(prefix), maxdepth=depth, detail=True)
            start = len(self._root) + 1
            return {path[start:]: int(info["size"]) for path, info in found.items()}

        try:
            return self._retried("list", prefix, find, may_be_missing=True)
        except FileNotFoundError:
            return {}

    def read(self, name: str) -> bytes:
        """Return an object.

        Raises:
            FileNotFoundError: there is none.
            StoreError: it cannot be read.
        """
        path = self._path(name)
        return self._retried(
            "read", name, lambda: self._fs.cat_file(path), may_be_missing=True
        )

    def write(self, name: str, content: bytes) -> None:
        """Write an object, in place of an earlier one."""
        self._retried(
            "write", name, lambda: self._fs.pipe_file(self._path(name), content)
        )

    def create(self, name: str, content: bytes) -> bool:
        """Write an object by a conditional put; return whether there was none.

        Of several processes that create one name, one gets True. So does a process
        whose put was repeated after a connection was cut, and whose content is there.
        """

        def put() -> bool:
            try:
                self._fs.pipe_file(self._path(name), content, mode="create")
            except FileExistsError:
                with contextlib.suppress(FileNotFoundError):
                    return bool(self._fs.cat_file(self._path(name)) == content)
                return False
            return True

        return self._retried("write", name, put)

    def upload(self, path: pathlib.Path, name: str) -> None:
        """Write an object from a file, in parts where it is large."""
        self._retried(
            "write", name, lambda: self._fs.put_file(str(path), self._path(name))
        )

    def download(self, name: str, path: pathlib.Path) -> None:
        """Write a file from an object."""
        self._retried(
            "read",
            name,
            lambda: self._fs.get_file(self._path(name), str(path)),
            may_be_missing=True,
        )

    def modified(self, name: str) -> float:
        """Return the time of the last write of an object, by the store's clock."""

        def read() -> float:
            self._fs.invalidate_cache()
            return self._fs.modified(self._path(name)).timestamp()

        return self._retried("read", name, read, may_be_missing=True)

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects, as far as they exist."""
        for name in names:

            def remove(name: str = name) -> None:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(self._path(name))

            self._retried("delete", name, remove)

    def abort_uploads(self, before: float) -> None:
        """Abort uploads in parts that killed processes have left; for the only writer.

        S3 keeps such parts, and bills them, until they are aborted. Other stores delete
        them after some days. Warn where the store does not allow it.

        Args:
            before: time by the store's clock. Uploads that started later may be a copy
                in progress, and are kept.
        """
        if "s3" not in self._fs.protocol:
            return
        bucket, _, key = self._root.partition("/")

        def abort() -> None:
            found = self._fs.call_s3(
                "list_multipart_uploads", Bucket=bucket, Prefix=f"{key}/"
            )
            for upload in found.get("Uploads", ()):
                if upload["Initiated"].timestamp() > before:
                    continue
                self._fs.call_s3(
                    "abort_multipart_upload",
                    Bucket=bucket,
                    Key=upload["Key"],
                    UploadId=upload["UploadId"],
                )

        try:
            self._retried("abort uploads to", "", abort)
        except StoreError as error:
            warnings.warn(str(error), stacklevel=2)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    def _retried(
        self,
        action: str,
        name: str,
        call: Callable[[], _Value],
        *,
        may_be_missing: bool = False,
    ) -> _Value:
        try:
            return retried(call, pauses=self._pauses, sleep=self._sleep)
        except Exception as error:
            if may_be_missing and isinstance(error, FileNotFoundError):
                raise
            remedy = "a store that responds, and credentials that may do so"
            if getattr(error, "errno", None) == errno.ENOSPC:
                remedy = f"free space in {tempfile.gettempdir()}: set TMPDIR"
            is_denied = action == "delete" and isinstance(error, PermissionError)
            raise (DeletionDeniedError if is_denied else StoreError)(
                f"Cannot {action} {self.address}/{name}: {reason_of(error)}; expected "
                f"{remedy}."
            ) from error
