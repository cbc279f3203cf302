"""Files in directories in which other users can write, as in /tmp or a shared run.

Another user may have made there, under a name that this process uses: a link to a file
or directory of this user, a FIFO in which `open` blocks, a file that is too long.
"""

import contextlib
import errno
import functools
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Iterator

_MAX_BYTES = 16 << 20
_SAFE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_TEMPORARY = re.compile(r"\.new-.+-\d+-\d+")


def open_regular(
    path: str | os.PathLike,
    flags: int,
    *,
    directory: int | None = None,
    owner: int | None = None,
) -> int:
    """Open a regular file, and no link; never block. An `opener` for `open`.

    Args:
        directory: open directory that `path` is relative to.
        owner: user whose file it has to be.

    Raises:
        OSError: it cannot be opened, or is another kind of file.
    """
    # The mode is restricted by the umask. Truncated below, when it is known.
    opened = _open(path, flags & ~os.O_TRUNC, mode=0o666, directory=directory)
    try:
        status = os.fstat(opened)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if owner not in (None, status.st_uid):
            raise PermissionError(errno.EPERM, _FOREIGN, str(path))
        if flags & os.O_TRUNC:
            os.ftruncate(opened, 0)
    except OSError:
        os.close(opened)
        raise
    return opened


_FOREIGN = "it belongs to another user"


def _open(
    path: str | os.PathLike, flags: int, *, mode: int, directory: int | None
) -> int:
    try:
        return os.open(path, flags | _SAFE_FLAGS, mode, dir_fd=directory)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link", str(path)) from None
        raise


class OpenDirectory:
    """An open directory, which is not a link; to be used in a `with` statement.

    All operations are on this directory, also if its path has since become another one.
    Operations on what is not a regular file are errors, or skip it.
    """

    def __init__(
        self, path: str | os.PathLike, *, make: bool = False, is_private: bool = True
    ) -> None:
        """Open a directory.

        Args:
            make: whether to make it where it does not exist, in one that does.
            is_private: whether it and all files in it have to belong to this user.
                Other users then have no access.

        Raises:
            OSError: it cannot be opened, is a link, or belongs to another user.
        """
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700 if is_private else 0o777)
        self._mode = 0o600 if is_private else 0o666
        self._owner: int | None = None
        flags = os.O_RDONLY | os.O_DIRECTORY
        self._number = _open(path, flags, mode=0, directory=None)
        if is_private:
            try:
                self._owner = _private_owner(self._number, path)
            except OSError:
                os.close(self._number)
                raise

    def __enter__(self) -> "OpenDirectory":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._number)

    def names(self) -> list[str]:
        """Return the names of all entries, sorted."""
        return sorted(os.listdir(self._number))

    def read(self, name: str) -> str:
        """Return the text of a file.

        Raises:
            OSError: it is missing, too long, of another user, or no regular file.
        """
        opened = open_regular(
            name, os.O_RDONLY, directory=self._number, owner=self._owner
        )
        with open(opened, errors="replace") as file:
            if os.fstat(opened).st_size > _MAX_BYTES:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), name)
            return file.read(_MAX_BYTES)

    def write(self, name: str, text: str) -> None:
        """Write a file, which a reader sees as a whole."""
        with self._temporary(text) as new:
            os.replace(new, name, src_dir_fd=self._number, dst_dir_fd=self._number)

    def claim(self, name: str, text: str, *, stale_seconds: float) -> bool:
        """Write a file unless there is a newer one; return whether it was written.

        A reader may see a part of it. One of several processes writes it.
        """
        with self._temporary(text) as new:
            # By the clock of the file system.
            now = self._status(new).st_mtime
            with contextlib.suppress(FileNotFoundError):
                if now - self._status(name).st_mtime > stale_seconds:
                    self.remove(name)
        # Not by a link of the temporary file: some file systems have none.
        with contextlib.suppress(FileExistsError):
            self._create(name, text)
            return True
        return False

    def remove(self, name: str) -> None:
        """Remove a file, unless it is missing, of another user, or no regular file."""
        with contextlib.suppress(FileNotFoundError):
            status = self._status(name)
            if stat.S_ISREG(status.st_mode) and self._owner in (None, status.st_uid):
                os.unlink(name, dir_fd=self._number)

    def remove_all(self, names: re.Pattern[str]) -> None:
        """Remove the files of these names, and what a killed `write` has left."""
        for name in self.names():
            if names.fullmatch(name) or _TEMPORARY.fullmatch(name):
                self.remove(name)

    def _status(self, name: str) -> os.stat_result:
        return os.stat(name, dir_fd=self._number, follow_symlinks=False)

    def _create(self, name: str, text: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        made = _open(name, flags, mode=self._mode, directory=self._number)
        with open(made, "w") as file:
            file.write(text)

    @contextlib.contextmanager
    def _temporary(self, text: str) -> Iterator[str]:
        name = f".new-{socket.gethostname()}-{os.getpid()}-{time.monotonic_ns()}"
        try:
            self._create(name, text)
            yield name
        finally:
            self.remove(name)


def _private_owner(number: int, path: str | os.PathLike) -> int:
    """Return the owner of an open directory; raise an error if it is another user."""
    status = os.fstat(number)
    # A file system may give all files one owner, as NFS with `root_squash`.
    if status.st_uid != os.geteuid() and status.st_uid != _owner_of_files(
        status.st_dev, f"/proc/self/fd/{number}"
    ):
        raise PermissionError(errno.EPERM, _FOREIGN, str(path))
    if stat.S_IMODE(status.st_mode) & 0o077:
        # Some of these file systems have one mode for all.
        with contextlib.suppress(OSError):
            os.fchmod(number, 0o700)
    return status.st_uid


@functools.cache
def _owner_of_files(device: int, directory: str) -> int:
    """Return the owner of new files of this process on the file system `device`."""
    with tempfile.TemporaryFile(dir=directory) as file:
        return os.fstat(file.fileno()).st_uid
