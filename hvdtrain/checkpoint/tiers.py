"""Checkpoints on a disk and in a store, of which the newest one is used."""

from collections.abc import Callable
from typing import TypeVar

from hvdtrain.checkpoint.header import Checkpoint, Header
from hvdtrain.checkpoint.storage import CheckpointError, CheckpointFiles

_Read = TypeVar("_Read")


class TieredFiles:
    """The checkpoints of both; one that is damaged on the disk is read from the store.

    It has the reading methods of `CheckpointFiles`. `TieredWriter` writes to both.
    """

    def __init__(self, disk: CheckpointFiles, store: CheckpointFiles) -> None:
        self.disk = disk
        self.store = store

    def steps(self) -> list[int]:
        return sorted({*self.disk.steps(), *self.store.steps()}, reverse=True)

    def path(self, step: int) -> object:
        return self._tiers(step)[0].path(step)

    def header(self, step: int) -> Header:
        return self._read(step, lambda tier: tier.header(step))

    def read(self, step: int) -> Checkpoint:
        return self._read(step, lambda tier: tier.read(step))

    def verify(self, step: int) -> Header:
        return self._read(step, lambda tier: tier.verify(step))

    def delete_leftovers(self) -> None:
        self.disk.delete_leftovers()
        self.store.delete_leftovers()

    def supersede_after(self, step: int) -> None:
        self.disk.supersede_after(step)
        self.store.supersede_after(step)

    def _tiers(self, step: int) -> list[CheckpointFiles]:
        return [tier for tier in (self.disk, self.store) if step in tier.steps()]

    def _read(self, step: int, read: Callable[[CheckpointFiles], _Read]) -> _Read:
        first, *others = self._tiers(step)
        try:
            return read(first)
        except CheckpointError:
            for other in others:
                return read(other)
            raise
