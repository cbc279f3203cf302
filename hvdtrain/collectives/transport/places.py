"""Where the ranks of a job are: on which hosts, on which cores, at which addresses."""

import dataclasses
import itertools
from collections.abc import Sequence

from hvdtrain.handshake import Address


@dataclasses.dataclass(frozen=True)
class RankPlace:
    """Where one rank is, in values that JSON can hold.

    Attributes:
        host: number of its host.
        local_rank: its number within the host.
        cores: on which it may run.
        quotas: of processor time, in cores.
        address: where its peers on other hosts connect, if there are any.
    """

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

    @property
    def local_ranks(self) -> list[int]:
        """Ranks of this rank's host, in the order of their numbers."""
        host = self.mine.host
        ranks = [r for r, each in enumerate(self.by_rank) if each.host == host]
        return sorted(ranks, key=lambda rank: self.by_rank[rank].local_rank)

    @property
    def peers(self) -> list[int]:
        """By host, the rank that has this rank's number within its host."""
        number = self.mine.local_rank
        ranks = [r for r, each in enumerate(self.by_rank) if each.local_rank == number]
        return sorted(ranks, key=lambda rank: self.by_rank[rank].host)

    @property
    def obstacle(self) -> str:
        """Why hosts cannot reduce with each other, the same on all ranks."""
        found = {(place.host, place.local_rank) for place in self.by_rank}
        hosts, numbers = map(set, zip(*found, strict=True))
        if found != set(itertools.product(hosts, numbers)):
            return "the hosts have different numbers of ranks"
        return ""

    @property
    def path(self) -> str:
        """How native reductions move tensors, as a short text."""
        if len(self.peers) == 1:
            return "shared memory"
        return "TCP" if len(self.local_ranks) == 1 else "shared memory and TCP"

    @property
    def is_core_shared(self) -> bool:
        """Whether a rank that spins may take processor time from one of its host."""
        local = [self.by_rank[rank] for rank in self.local_ranks]
        cores = set(itertools.chain.from_iterable(place.cores for place in local))
        # A shared quota and one quota per rank cannot be told apart. In the second
        # case ranks sleep although they could spin.
        quotas = itertools.chain.from_iterable(place.quotas for place in local)
        return min(len(cores), min(quotas, default=len(local))) < len(local)
