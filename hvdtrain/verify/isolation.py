"""A copy of the working directory, in which the script runs in one phase.

A script that continues from its own files would continue in the second phase from those
of the first one, and in a job from those of the verification. So the copy is removed
after its phase.

The copy is in a tree that has the paths of this machine: `TREE/home/me/project` is the
copy of `/home/me/project`, and all beside it, such as `TREE/home/me/data`, is a link. A
relative path, as `../data`, is then the same in the copy.
"""

import collections
import itertools
import os
import pathlib
import shutil
import stat
from collections.abc import Collection, Iterator

# Of one copied directory. What is beyond is linked: the script reads it, and a file
# that it writes there remains.
MAX_FILES, MAX_BYTES = 10_000, 1 << 27


def make_tree(
    tree: pathlib.Path,
    directories: Collection[pathlib.Path],
    *,
    excluded: pathlib.Path,
) -> None:
    """Make a tree with copies of some directories, and links to all beside them.

    Args:
        tree: the root of the tree, which is made.
        directories: absolute paths without links.
        excluded: a directory that the tree does not have.
    """
    outer = {
        each for each in directories if not any(x in each.parents for x in directories)
    }
    _link_beside(pathlib.Path("/"), tree, outer, excluded)


def _link_beside(
    source: pathlib.Path,
    target: pathlib.Path,
    directories: Collection[pathlib.Path],
    excluded: pathlib.Path,
) -> None:
    """Copy the directories inside of `source`, and link the rest."""
    if source in directories:
        _copy(source, target, excluded)
        return
    target.mkdir()
    followed = {
        source / each.relative_to(source).parts[0]
        for each in directories
        if source in each.parents
    }
    # A directory above may be closed to this user.
    listed = {pathlib.Path(entry.path) for entry in _entries(source)}
    for path in followed | listed - {excluded}:
        if path in followed:
            _link_beside(path, target / path.name, directories, excluded)
        else:
            (target / path.name).symlink_to(path)


def _copy(source: pathlib.Path, target: pathlib.Path, excluded: pathlib.Path) -> None:
    """Copy a directory, the files at its top before those in directories below."""
    device = source.stat().st_dev
    files, size = MAX_FILES, MAX_BYTES
    waiting = collections.deque([(source, target)])
    while waiting:
        directory, copy = waiting.popleft()
        entries = list(itertools.islice(_entries(directory), files + 1))
        if directory == source:
            entries = list(_entries(directory))
        elif len(entries) > files:
            copy.symlink_to(directory)
            continue
        files = max(files - len(entries), 0)
        copy.mkdir()
        for entry in sorted(entries, key=lambda each: each.name):
            path, place = pathlib.Path(entry.path), copy / entry.name
            if path == excluded:
                continue
            # Environments and repositories are hidden directories.
            status = None if entry.name.startswith(".") else _status(entry, device)
            if status and stat.S_ISDIR(status.st_mode):
                waiting.append((path, place))
            elif status and status.st_size <= size and _copy_file(path, place):
                size -= status.st_size
            else:
                place.symlink_to(path)


def _entries(directory: pathlib.Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            yield from entries
    except OSError:
        # It is closed to this user, or has gone.
        return


def _status(entry: os.DirEntry[str], device: int) -> os.stat_result | None:
    """Return the status of a file or directory that can be copied, or None."""
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:
        return None
    is_copied = stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)
    # Not another disk, or /proc.
    return status if is_copied and status.st_dev == device else None


def _copy_file(source: pathlib.Path, target: pathlib.Path) -> bool:
    try:
        # With its time: compiled modules are valid for it.
        shutil.copy2(source, target)
    except OSError:
        target.unlink(missing_ok=True)
        return False
    return True
