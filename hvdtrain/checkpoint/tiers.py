"""Checkpoints on a disk and in a store, of which the newest one is used."""

from collections.abc import Callable
from typing import TypeVar

from hvdtrain.checkpoint.header import Checkpoint, Header
from hvdtrain.checkpoint.storage import (
    CheckpointError,
    CheckpointFiles,
    UnreadableError,
)

_Read = TypeVar("_Read")


class TieredFiles:
    """Two `CheckpointFiles`: a checkpoint that the disk has not intact is the store's.

    It has the reading methods of `CheckpointFiles`. `TieredWriter` writes to both.
    """

    def __init__(self, disk: CheckpointFiles, store: CheckpointFiles) -> None:
        self.disk = disk
        self.store = store
        self._paths: dict[int, object] = {}

    def steps(self) -> list[int]:
        return sorted({*self.disk.steps(), *self.store.steps()}, reverse=True)

    def path(self, step: int) -> object:
        """Return where a checkpoint was read, or would be."""
        return self._paths.get(step, self.store.path(step))

    def header(self, step: int) -> Header:
        return self._read(step, lambda tier: tier.header(step))

    def read(self, step: int) -> Checkpoint:
        return self._read(step, lambda tier: tier.read(step))

    def verify(self, step: int) -> Header:
        return self._read(step, lambda tier: tier.verify(step))

    def prepare(self) -> None:
        self.disk.prepare()
        self.store.prepare()

    def supersede_after(self, step: int) -> None:
        self.disk.supersede_after(step)
        self.store.supersede_after(step)

    def _read(self, step: int, read: Callable[[CheckpointFiles], _Read]) -> _Read:
        self._paths[step] = self.disk.path(step)
        try:
            return read(self.disk)
        except (CheckpointError, UnreadableError):
            # Missing, damaged, or behind a disk that fails.
            self._paths[step] = self.store.path(step)
            return read(self.store)
