"""Where the ranks of a job are: on which hosts, on which cores, at which addresses."""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from hvdtrain.handshake import Address


@dataclasses.dataclass(frozen=True)
class RankPlace:
    """Where one rank is, in values that JSON can hold.

    Attributes:
        hostname: name of its host, or the address that the launcher knows.
        host: number of its host among those with a rank of this local rank.
        local_rank: its number within the host.
        cores: on which it may run.
        quotas: of processor time, in cores.
        address: where its peers on other hosts connect, if there are any.
    """

    hostname: str
    host: int
    local_rank: int
    cores: Sequence[int]
    quotas: Sequence[float]
    address: Address = ("", 0)


@dataclasses.dataclass(frozen=True)
class RankPlaces:
    """The places of all ranks, seen from one of them."""

    by_rank: Sequence[RankPlace]
    rank: int

    @property
    def mine(self) -> RankPlace:
        """The place of this rank."""
        return self.by_rank[self.rank]

    @functools.cached_property
    def hosts(self) -> list[list[int]]:
        """By host, its ranks in the order of their numbers within it.

        Hosts are told apart by name, or, where several have one name, by Horovod's
        numbers, which the ranks of a host share only if the hosts have equally many.
        """
        hosts = self._grouped(lambda place: place.hostname)
        numbered = self._grouped(lambda place: place.host)
        if not all(map(self._is_host, hosts)) and len({*map(len, numbered)}) == 1:
            hosts = numbered
        return sorted(hosts, key=lambda ranks: self.by_rank[ranks[0]].host)

    def _grouped(self, key: Callable[[RankPlace], Any]) -> list[list[int]]:
        found = collections.defaultdict(list)
        for rank, place in enumerate(self.by_rank):
            found[key(place)].append(rank)
        return [
            sorted(ranks, key=lambda rank: self.by_rank[rank].local_rank)
            for ranks in found.values()
        ]

    def _is_host(self, ranks: list[int]) -> bool:
        numbers = [self.by_rank[rank].local_rank for rank in ranks]
        return numbers == list(range(len(ranks)))

    @property
    def host(self) -> int:
        """The number of this rank's host."""
        return next(n for n, ranks in enumerate(self.hosts) if self.rank in ranks)

    @property
    def local_ranks(self) -> list[int]:
        """Ranks of this rank's host, in the order of their numbers."""
        return self.hosts[self.host]

    @property
    def smallest_host(self) -> int:
        """Ranks of the host that has the fewest."""
        return min(map(len, self.hosts))

    @property
    def largest_host(self) -> int:
        """Ranks of the host that has the most."""
        return max(map(len, self.hosts))

    @property
    def peers(self) -> list[int]:
        """By host, the rank that has this rank's number within its host.

        Empty in a job of one host, and where not all hosts have such a rank.
        """
        number = self.mine.local_rank
        if len(self.hosts) == 1 or number >= self.smallest_host:
            return []
        return [ranks[number] for ranks in self.hosts]

    @property
    def obstacle(self) -> str:
        """Why hosts cannot reduce with each other, the same on all ranks."""
        for ranks in self.hosts:
            if not self._is_host(ranks):
                name = self.by_rank[ranks[0]].hostname
                return f"several hosts of different numbers of ranks are named {name}"
        return ""

    @property
    def path(self) -> str:
        """How native reductions move tensors, as a short text."""
        if len(self.hosts) == 1:
            return "shared memory"
        return "TCP" if self.largest_host == 1 else "shared memory and TCP"

    @property
    def is_core_shared(self) -> bool:
        """Whether a rank that spins may take processor time from one of its host."""
        local = [self.by_rank[rank] for rank in self.local_ranks]
        cores = set(itertools.chain.from_iterable(place.cores for place in local))
        # A shared quota and one quota per rank cannot be told apart. In the second
        # case ranks sleep although they could spin.
        quotas = itertools.chain.from_iterable(place.quotas for place in local)
        return min(len(cores), min(quotas, default=len(local))) < len(local)
