"""A copy of the working directory, in which the script runs in one phase.

A script that continues from its own files would continue in the second phase from those
of the first one, and in a job from those of the verification. So the copy is removed
after its phase.

The copy is in a tree that has the paths of this machine: `TREE/home/me/project` is the
copy of `/home/me/project`, and all beside it, such as `TREE/home/me/data`, is a link. A
relative path, as `../data`, is then the same in the copy. A link from one place of the
project to another leads to the place in the copy.
"""

import collections
import errno
import itertools
import os
import pathlib
import shutil
import stat
from collections.abc import Collection, Iterator

# Of one copied directory. What is beyond is linked, file by file: the script reads it,
# and a file that it writes there remains.
MAX_FILES, MAX_BYTES = 10_000, 1 << 27
# Of a directory above a copied one, such as /tmp: more are not linked.
MAX_ENTRIES = 10_000
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def make_tree(
    tree: pathlib.Path,
    directories: Collection[pathlib.Path],
    *,
    excluded: pathlib.Path,
) -> list[pathlib.Path]:
    """Make a tree with copies of some directories, and links to all beside them.

    Args:
        tree: the root of the tree, which is made.
        directories: absolute paths without links.
        excluded: a directory that the tree does not have.

    Returns:
        Directories above the copied ones with too many entries for links to them all:
        the tree has those alone that lead to copies.
    """
    outer = {
        each for each in directories if not any(x in each.parents for x in directories)
    }
    return list(_link_beside(pathlib.Path("/"), tree, outer, excluded))


def moved(argument: str, tree: pathlib.Path, copied: Collection[pathlib.Path]) -> str:
    """Return an argument of the script with an absolute path replaced by its copy.

    The path may follow a `=`, as in `--model_dir=/home/me/project/run`.
    """
    start = 0 if argument.startswith("/") else argument.find("=/") + 1
    path = argument[start:]
    place = _place_in(tree, path, copied) if path.startswith("/") else None
    return f"{argument[:start]}{place}" if place else argument


def _place_in(
    tree: pathlib.Path, path: str, copied: Collection[pathlib.Path]
) -> pathlib.Path | None:
    """Return where the copy of a file is; None if it is outside of the copies."""
    real = pathlib.Path(os.path.realpath(path))
    is_inside = any(each in (real, *real.parents) for each in copied)
    return tree / real.relative_to("/") if is_inside else None


def _link_beside(
    source: pathlib.Path,
    tree: pathlib.Path,
    directories: Collection[pathlib.Path],
    excluded: pathlib.Path,
) -> Iterator[pathlib.Path]:
    """Copy the directories inside of `source`, and link the rest.

    Yields:
        Directories with too many entries for links to them all.
    """
    if source in directories:
        _Copy(source, tree, directories, excluded).make()
        return
    target = tree / source.relative_to("/")
    target.mkdir()
    followed = {
        source / each.relative_to(source).parts[0]
        for each in directories
        if source in each.parents
    }
    for path in followed:
        yield from _link_beside(path, tree, directories, excluded)
    # A directory above may be closed to this user.
    entries = list(itertools.islice(_entries(source), MAX_ENTRIES + 1))
    if len(entries) > MAX_ENTRIES:
        yield source
        return
    others = {pathlib.Path(entry.path) for entry in entries} - followed - {excluded}
    for path in others:
        (target / path.name).symlink_to(path)


class _Copy:
    """A copy of one directory.

    Args:
        source: the directory.
        tree: the root of the tree with the copy.
        directories: all that are copied, which links may lead to.
        excluded: a directory that the copy does not have.
    """

    def __init__(
        self,
        source: pathlib.Path,
        tree: pathlib.Path,
        directories: Collection[pathlib.Path],
        excluded: pathlib.Path,
    ) -> None:
        self._source = str(source)
        self._tree = tree
        self._directories = directories
        self._excluded = str(excluded)
        self._device = source.stat().st_dev
        self._bytes = MAX_BYTES

    def make(self) -> None:
        """Make it: files at the top are copied before those in directories below."""
        files = MAX_FILES
        top = self._tree / os.path.relpath(self._source, "/")
        waiting = collections.deque([(self._source, str(top))])
        while waiting:
            directory, copy = waiting.popleft()
            os.mkdir(copy)
            entries = [x for x in _entries(directory) if x.path != self._excluded]
            # A directory of images leaves the number to the directories after it.
            is_copied = directory == self._source or len(entries) <= files
            files = max(files - len(entries), 0) if is_copied else files
            for entry in sorted(entries, key=lambda each: each.name):
                place = os.path.join(copy, entry.name)
                if self._is_followed(entry):
                    waiting.append((entry.path, place))
                elif not (is_copied and self._copy_file(entry, place)):
                    os.symlink(self._end(entry), place)

    def _is_followed(self, entry: os.DirEntry[str]) -> bool:
        # Environments and repositories are hidden directories.
        if entry.name.startswith(".") or not entry.is_dir(follow_symlinks=False):
            return False
        status = _status(entry)
        # Not another disk, or /proc.
        return status is not None and status.st_dev == self._device

    def _copy_file(self, entry: os.DirEntry[str], place: str) -> bool:
        status = None if entry.name.startswith(".") else _status(entry)
        if not (status and stat.S_ISREG(status.st_mode)):
            return False
        # A file may be mounted, too.
        if status.st_dev != self._device or status.st_size > self._bytes:
            return False
        is_copied = _copy_file(entry.path, place)
        self._bytes -= status.st_size if is_copied else 0
        return is_copied

    def _end(self, entry: os.DirEntry[str]) -> str | pathlib.Path:
        """Return the path to which a link in place of an entry leads."""
        # A link to a directory of the project would lead to the original.
        if not entry.is_symlink():
            return entry.path
        return _place_in(self._tree, entry.path, self._directories) or entry.path


def _entries(directory: str | pathlib.Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            yield from entries
    except OSError:
        # It is closed to this user, or has gone.
        return


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat(follow_symlinks=False)
    except OSError:
        return None


def _copy_file(source: str, target: str) -> bool:
    try:
        # With its time: compiled modules are valid for it.
        shutil.copy2(source, target)
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise
        pathlib.Path(target).unlink(missing_ok=True)
        return False
    return True
