"""Arrays that are in memory once per node, mapped by the ranks of the node.

One rank writes each array in the format of `.npy` to an anonymous file of the kernel
(`memfd_create`). Such a file has no name in any directory: it is freed with the last
process that maps it, however that process ends. The other ranks map it by the path
/proc/<pid>/fd/<number>, while the first rank keeps it open.

Files in the cache directory would share their pages as well. MNIST (55 MB), measured on
2 and 4 processes: both ways have a PSS of 99 and 143 MB over all processes, against 161
and 316 MB where each process reads the data. But a file in the cache

- is not shared where the cache is read-only or full, or where a node has none;
- ends the job by SIGBUS if it is truncated while the job runs;
- takes 0.17 s to write, against 0.03 s, and stays there, for each set of custom data;
- has to be trusted, if another user wrote it, or hashed at each start (0.05 to 0.2 s).
"""

import contextlib
import mmap
import os
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

_BOOT_ID = "/proc/sys/kernel/random/boot_id"


class Identity(NamedTuple):
    """Identifies an open file among the files of all nodes and containers."""

    boot_id: str
    device: int
    inode: int


class Handle(NamedTuple):
    """An array in a file that another process of the node has open.

    The path is valid in the PID namespace of that process.
    """

    path: str
    identity: Identity


def share(
    arrays: Mapping[str, np.ndarray], files: contextlib.ExitStack
) -> dict[str, Handle]:
    """Copy arrays into files that the processes of this node can map.

    The handles are valid until `files` is closed.

    Raises:
        OSError: this system has no anonymous files, or not enough memory.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no anonymous files")
    handles = {}
    for key, array in arrays.items():
        descriptor = os.memfd_create("hvdtrain", os.MFD_CLOEXEC)
        # Written, not mapped: a lack of memory is an error of `write` here, and would
        # be a SIGBUS in a mapping.
        file = files.enter_context(os.fdopen(descriptor, "wb"))
        np.save(file, array, allow_pickle=False)
        file.flush()
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        handles[key] = Handle(path, _identify(path))
    return handles


def attach(handles: Mapping[str, Handle]) -> dict[str, np.ndarray]:
    """Return the arrays that a process shares, as read-only mappings.

    Raises:
        OSError: the process is not on this node, or the system denies access.
    """
    arrays = {}
    for key, handle in handles.items():
        # Checked before the file is opened: on another host, or in another container,
        # the same path may be a pipe or a device of an unrelated process.
        if _identify(handle.path) != handle.identity:
            raise OSError("no process of this node shares these arrays")
        array = np.asarray(np.load(handle.path, mmap_mode="r"))
        # Access each page: the page faults (9 ms for MNIST) would otherwise slow down
        # the steps of the first epoch.
        array.reshape(-1).view(np.uint8)[:: mmap.PAGESIZE].max(initial=0)
        arrays[key] = array
    return arrays


def _identify(path: str) -> Identity:
    stat = os.stat(path)
    with open(_BOOT_ID) as file:
        return Identity(file.read().strip(), stat.st_dev, stat.st_ino)
