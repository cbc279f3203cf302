"""The time of a step on more ranks than there are: pure functions of numbers.

The alpha-beta model: a message of n bytes takes alpha + n * beta seconds. An allreduce
of n bytes over N ranks then takes (Thakur, Rabenseifner and Gropp, "Optimization of
Collective Communication Operations in MPICH", 2005; for the ring also Patarasuk and
Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009)::

    ring                  2 (N-1) alpha        + 2 (N-1)/N n beta
    tree                  2 ceil(log2 N) alpha + 2 ceil(log2 N) n beta
    halving and doubling  2 ceil(log2 N) alpha + 2 (N-1)/N n beta

The tree is a binomial one: a reduction to its root, then a broadcast. The time of the
additions is part of beta. Alpha and beta are not measured one by one: the line that
is fitted to allreduces over the ranks that there are is divided by the factors above,
so that each algorithm reproduces the measurement, and differs in how it scales.
"""

import dataclasses
import math

ALGORITHMS = ("ring", "tree", "halving and doubling")
# Of the step's computation. A backward pass has two products of matrices for each one
# of the forward pass.
BACKWARD_SHARE = 2 / 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """The time of an allreduce as a function of its size.

    Attributes:
        latency: seconds of an empty message.
        seconds_per_byte: the slope.
        size: number of ranks that it was measured with.
    """

    latency: float
    seconds_per_byte: float
    size: int

    @classmethod
    def fit(cls, counts, seconds, *, size):
        """Return the line with the least squares of relative errors.

        Of absolute errors, the largest messages would determine the latency.

        Args:
            counts: bytes of each message.
            seconds: its time.
            size: number of ranks.
        """
        weights = [1 / each**2 for each in seconds]
        total = sum(weights)
        mean_count = _dot(weights, counts) / total
        mean_seconds = _dot(weights, seconds) / total
        offsets = [count - mean_count for count in counts]
        moments = [w * offset for w, offset in zip(weights, offsets, strict=True)]
        slope = _dot(moments, [s - mean_seconds for s in seconds])
        slope = max(0.0, slope / _dot(moments, offsets))
        latency = max(0.0, mean_seconds - slope * mean_count)
        return cls(latency=latency, seconds_per_byte=slope, size=size)

    def seconds(self, count, *, size, algorithm):
        """Return the projected time of an allreduce.

        Args:
            count: its bytes.
            size: number of ranks.
            algorithm: one of `ALGORITHMS`.
        """
        now, then = _factors(algorithm, self.size), _factors(algorithm, size)
        return (
            self.latency * then[0] / now[0]
            + count * self.seconds_per_byte * then[1] / now[1]
        )


def _dot(left, right):
    return sum(a * b for a, b in zip(left, right, strict=True))


def _factors(algorithm, size):
    """Return the factors of alpha and of n * beta."""
    messages = {"ring": 2 * (size - 1)}.get(algorithm, 2 * math.ceil(math.log2(size)))
    volume = messages if algorithm == "tree" else 2 * (size - 1) / size
    return messages, volume


def exposed_seconds(buckets, *, backward_seconds, seconds_of):
    """Return how long the reduction goes on after the backward pass has ended.

    Gradients become ready at a constant rate of bytes. A bucket is reduced when all of
    it is ready and the bucket before it has been reduced.

    Args:
        buckets: the bytes of each, in the order in which they become ready.
        backward_seconds: of the backward pass.
        seconds_of: the time of a reduction as a function of its bytes.
    """
    total, ready, end = sum(buckets), 0, 0.0
    for count in buckets:
        ready += count
        end = max(end, backward_seconds * ready / total) + seconds_of(count)
    return max(0.0, end - backward_seconds)


def project(line, *, size, buckets, step_seconds, compute_seconds):
    """Return the projection for a number of ranks.

    Args:
        line: the `Line` of the measured ranks.
        size: number of ranks.
        buckets: the bytes of each, in the order in which they become ready.
        step_seconds: of a step without communication.
        compute_seconds: the part of it that is forward and backward pass and update.

    Returns:
        A dict by algorithm with, in seconds: `communication` of one bucket of all
        gradients, the `step` with that, and the `overlapped_step`, in which buckets
        are reduced while the backward pass goes on; and a step `without_communication`
        divided by the latter.
    """
    projected = {}
    for algorithm in ALGORITHMS:

        def seconds_of(part, algorithm=algorithm):
            return line.seconds(part, size=size, algorithm=algorithm)

        exposed = exposed_seconds(
            buckets,
            backward_seconds=BACKWARD_SHARE * compute_seconds,
            seconds_of=seconds_of,
        )
        projected[algorithm] = {
            "communication": seconds_of(sum(buckets)),
            "step": step_seconds + seconds_of(sum(buckets)),
            "overlapped_step": step_seconds + exposed,
            "without_communication": step_seconds / (step_seconds + exposed),
        }
    return projected
