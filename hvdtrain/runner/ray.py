"""Agents as tasks of Ray, in a placement group."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hvdtrain.runner import agent
from hvdtrain.runner.channel import Address
from hvdtrain.runner.engine import PlacedAgents

_END_SECONDS = 20
# Until a placement group is ready, where fewer ranks are accepted.
_READY_SECONDS = 5
_POLL_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class Ray:
    """Tasks of Ray, one per rank, which are placed at once or not at all.

    `ray.init` may be called before, as for a cluster; else Ray starts on this machine.

    Attributes:
        resources: that Ray reserves for each rank.
        min_workers: with how few ranks the job starts, or starts again, if the cluster
            has no room for `np`; by default it waits for all.
        runtime_env: the runtime environment of the tasks.
    """

    resources: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {"CPU": 1}
    )
    min_workers: int | None = None
    runtime_env: Mapping[str, Any] | None = None

    is_local = False

    @contextlib.contextmanager
    def place(self, address: Address, size: int) -> Iterator[PlacedAgents]:
        """Start a task for each rank; see `Engine.place`."""
        group = self._reserve(size)
        size = len(group.bundle_specs)
        references = []
        try:
            for index in range(size):
                task = ray.remote(agent.serve).options(**self._options(group, index))
                references.append(task.remote(address))
            yield PlacedAgents(size, lambda: _failure(references), self._advice)
            ray.wait(references, num_returns=size, timeout=_END_SECONDS)
        finally:
            # Ends tasks that still run, and those that have not started.
            ray.util.remove_placement_group(group)

    def _reserve(self, size: int) -> Any:
        smallest = size if self.min_workers is None else self.min_workers
        if not 1 <= smallest <= size:
            raise ValueError(
                f"Received min_workers={self.min_workers} with np={size}; expected "
                f"between 1 and {size}."
            )
        if smallest == size:
            return self._group(size)
        # A rank needs its resources on one node: fewer may fit.
        for count in range(self._fitting(size), smallest, -1):
            group = self._group(count)
            try:
                is_ready = group.wait(timeout_seconds=_READY_SECONDS)
            except BaseException:
                ray.util.remove_placement_group(group)
                raise
            if is_ready:
                return group
            ray.util.remove_placement_group(group)
        return self._group(smallest)

    def _fitting(self, size: int) -> int:
        """Return how many ranks the free resources are enough for, up to `size`."""
        deadline = time.monotonic() + _READY_SECONDS
        while True:
            free = self._free()
            count = min(int(free[name] // self.resources[name]) for name in free)
            # Ray reports the resources of a job that has ended some time later: wait,
            # or a restart would find none.
            if count >= size or time.monotonic() > deadline:
                return min(count, size)
            time.sleep(_POLL_SECONDS)

    def _group(self, count: int) -> Any:
        bundles = [dict(self.resources)] * count
        return ray.util.placement_group(bundles, strategy="PACK")

    def _advice(self) -> str:
        needs = dict(self.resources)
        return f"Each rank needs {needs}; the Ray cluster has {self._free()} free"

    def _free(self) -> dict[str, float]:
        free = ray.available_resources()
        return {name: free.get(name, 0) for name in self.resources}

    def _options(self, group: Any, index: int) -> dict[str, Any]:
        resources = dict(self.resources)
        return {
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "memory": resources.pop("memory", None),
            "resources": resources,
            "max_retries": 0,
            "runtime_env": dict(self.runtime_env) if self.runtime_env else None,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, index),
        }

    def __str__(self) -> str:
        """Return the name of the engine in messages."""
        return "Ray"


def _failure(references: list[Any]) -> str:
    ended, _ = ray.wait(references, num_returns=1, timeout=0)
    for reference in ended:
        try:
            ray.get(reference)
        except ray.exceptions.RayError as error:
            return f"a task has failed: {str(error).strip().splitlines()[-1]}"
        return "a task has ended"
    return ""
