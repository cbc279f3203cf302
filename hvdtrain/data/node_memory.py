"""Arrays that are in memory once per node, mapped by the ranks of the node.

One rank copies arrays into an anonymous file of the kernel (`memfd_create`). It has no
name in any directory: it is freed with the last process that maps it, however that
ends, and it needs neither a writable file system nor space in /dev/shm. The other ranks
open it as /proc/<pid>/fd/<number> of that rank, while that keeps it open.
"""

import dataclasses
import fcntl
import math
import mmap
import os

import numpy as np

_ALIGNMENT = 64
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


@dataclasses.dataclass(frozen=True)
class Handle:
    """What another process of the node needs to map the arrays.

    Attributes:
        path: name of the open file, in the PID namespace of the rank that shares it.
        identity: boot of the kernel, device and inode.
        layout: key, dtype, shape and offset in bytes of each array.
        size: bytes of the file.
    """

    path: str
    identity: tuple
    layout: tuple
    size: int


def share(arrays):
    """Copy arrays into a file that the processes of this node can map.

    Args:
        arrays: dict of NumPy arrays.

    Returns:
        The file descriptor, to be closed when the other processes have called `attach`,
        and the `Handle` for them.

    Raises:
        OSError: this system has no such files, or not enough memory.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no anonymous files")
    layout, size = [], 0
    for key, array in arrays.items():
        layout.append((key, array.dtype.str, array.shape, size))
        size += math.ceil(array.nbytes / _ALIGNMENT) * _ALIGNMENT
    descriptor = os.memfd_create("hvdtrain", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Reserved now: a lack of memory would be a SIGBUS at the first access.
        os.posix_fallocate(descriptor, 0, max(size, 1))
        with open(descriptor, "wb", closefd=False) as file:
            for (_, _, _, offset), array in zip(layout, arrays.values(), strict=True):
                file.seek(offset)
                file.write(np.ascontiguousarray(array).data)
        # Nobody can change or truncate it from here on, by the descriptor or a path.
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        identity = _identity(os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    return descriptor, Handle(path, identity, tuple(layout), max(size, 1))


def attach(handles):
    """Map the arrays that a process of this node shares.

    Args:
        handles: the `Handle`s of all nodes; those of other nodes are ignored.

    Returns:
        A dict of read-only NumPy arrays.

    Raises:
        OSError: no handle is of this node, or the system denies access to the file.
    """
    for handle in handles:
        # Before it is opened: in another container or host the path may be any file of
        # another process.
        if _is_here(handle):
            descriptor = os.open(handle.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return _map(descriptor, handle)
            finally:
                os.close(descriptor)
    raise OSError("no process of this node shares these arrays")


def _is_here(handle):
    try:
        return _identity(os.stat(handle.path)) == handle.identity
    except OSError:
        return False


def _identity(stat):
    with open(_BOOT_ID) as file:
        return file.read().strip(), stat.st_dev, stat.st_ino


def _map(descriptor, handle):
    # Populated now: a page fault for every 64 kB would be part of the first epoch.
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    memory = mmap.mmap(descriptor, handle.size, flags=flags, prot=mmap.PROT_READ)
    return {
        key: np.ndarray(shape, dtype, memory, offset)
        for key, dtype, shape, offset in handle.layout
    }
