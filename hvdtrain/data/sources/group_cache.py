"""The groups of samples that were read last, for several threads."""

import collections
import concurrent.futures
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Group = TypeVar("Group")


class GroupCache(Generic[Group]):
    """Loads groups by number, and keeps those that were used last.

    A group that several threads need at a time is loaded by one of them.

    Args:
        capacity: number of groups that are kept.
    """

    def __init__(self, load: Callable[[int], Group], *, capacity: int) -> None:
        self._load = load
        self._capacity = capacity
        self._lock = threading.Lock()
        self._futures: collections.OrderedDict[
            int, concurrent.futures.Future[Group]
        ] = collections.OrderedDict()

    def get(self, number: int) -> Group:
        """Return a group. Raises what `load` raises, in each thread that needs it."""
        with self._lock:
            is_new = number not in self._futures
            future = self._futures.setdefault(number, concurrent.futures.Future())
            self._futures.move_to_end(number)
            if len(self._futures) > self._capacity:
                self._futures.popitem(last=False)
        if is_new:
            try:
                future.set_result(self._load(number))
            except BaseException as error:
                # The next call tries again.
                with self._lock:
                    self._futures.pop(number, None)
                future.set_exception(error)
        return future.result()
