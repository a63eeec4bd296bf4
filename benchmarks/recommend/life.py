"""The lives that are generated and replayed, and the workloads that they belong to."""

from dataclasses import dataclass

GIB = 1 << 30
HOUR = 3600.0
DAY = 24 * HOUR


@dataclass(frozen=True, slots=True)
class Life:
    """One container on one device, from its start to its end."""

    start_s: float
    end_s: float
    #: Pairs of time and bytes in use, in order of time. The first is soon after the start, and the
    #: last at the end.
    use: tuple[tuple[float, int], ...]
    #: How the life ended. ``completed`` means that it ended by itself or was replaced by its
    #: controller. The other values are ``failed``, ``evicted`` and ``oom``.
    ending: str
    #: Stands for the pod's image, arguments and environment. It is equal for lives of one program.
    program: str

    @property
    def peak_bytes(self) -> int:
        return max(used for _, used in self.use)

    def peak_until(self, time_s: float) -> int:
        """Return the highest use until ``time_s``; 0 before the first."""
        return max((used for at_s, used in self.use if at_s <= time_s), default=0)


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    kind: str
    device_bytes: int
    #: The author's requests, as pairs of time and the bytes that hold from then on, in order of
    #: time.
    requests: tuple[tuple[float, int], ...]
    #: The lives, in order of their start.
    lives: tuple[Life, ...]

    def requested_at(self, time_s: float) -> int:
        return [amount for since_s, amount in self.requests if since_s <= time_s][-1]
