"""Which faults a storm is made of: a pure function of its seed.

Every kind comes before any comes twice, in an order and at moments that the seed draws.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

#: Faults of processes that take no part in scheduling: kind -> whom it befalls, and for how many
#: seconds at least and at most.
BYSTANDERS: dict[str, tuple[str, float, float]] = {
    f"{whom} {what}": (whom, least_s, most_s)
    for whom in ("console", "webhook")
    for what, least_s, most_s in (
        ("killed", 0.0, 15.0),
        ("paused", 5.0, 90.0),
        ("cut off", 5.0, 40.0),
        ("slow", 10.0, 40.0),
        ("flooded", 5.0, 30.0),
    )
}
KINDS: dict[str, tuple[str, float, float]] = {
    "extender killed": ("extender", 0.0, 15.0),
    "extender paused": ("extender", 5.0, 90.0),
    "extender's clock moved": ("extender", 10.0, 60.0),
    "extender cut off": ("extender", 5.0, 40.0),
    "latency": ("extender", 10.0, 40.0),
    "connections dropped": ("extender", 10.0, 30.0),
    "connections cut": ("extender", 0.0, 0.0),
    "watches cut": ("extender", 0.0, 0.0),
    "answered 409": ("extender", 10.0, 30.0),
    "answered 429": ("extender", 10.0, 30.0),
    "answered 500": ("extender", 10.0, 30.0),
    "done and answered 409": ("extender", 10.0, 30.0),
    "done and answered 500": ("extender", 10.0, 30.0),
    "done and not answered": ("extender", 10.0, 30.0),
    "passed on late": ("extender", 10.0, 30.0),
    "scheduler killed": ("scheduler", 0.0, 10.0),
    "scheduler paused": ("scheduler", 5.0, 60.0),
    "API server restarted": ("plane", 0.0, 5.0),
    "etcd restarted": ("plane", 0.0, 5.0),
    "agent silent": ("node", 10.0, 150.0),
    "agent overstates": ("node", 10.0, 60.0),
    "agent forgets": ("node", 10.0, 60.0),
    "agent frozen": ("node", 10.0, 60.0),
    "agent's clock moved": ("node", 10.0, 60.0),
    "GPUNode deleted": ("node", 0.0, 0.0),
    **BYSTANDERS,
}


@dataclass(frozen=True, slots=True)
class Fault:
    at_s: float
    kind: str
    target: str
    #: 0: it is over at once.
    for_s: float
    #: 0..1, how bad.
    force: float

    def __str__(self) -> str:
        lasts = f" for {self.for_s:.1f} s" if self.for_s else ""
        return f"{self.at_s:7.1f} s  {self.kind}: {self.target}{lasts}, force {self.force:.2f}"


@dataclass(frozen=True, slots=True)
class Targets:
    extenders: Sequence[str]
    schedulers: Sequence[str]
    nodes: Sequence[str]
    consoles: Sequence[str]
    webhooks: Sequence[str]


def schedule(
    seed: int,
    lasts_s: float,
    targets: Targets,
    *,
    every_s: float,
    longest_s: float = 150.0,
    alone_s: float = 0.0,
) -> list[Fault]:
    """Faults for ``lasts_s`` seconds, one ``every_s`` on average; all are over by then. For the
    first ``alone_s`` they affect other components only, and end before the others begin."""
    lots = random.Random(seed)
    of = {
        "extender": targets.extenders,
        "scheduler": targets.schedulers,
        "node": targets.nodes,
        "plane": ("control plane",),
        "console": targets.consoles,
        "webhook": targets.webhooks,
    }
    faults: list[Fault] = []
    parts = (0.0, alone_s, BYSTANDERS), (alone_s, lasts_s, KINDS)
    for begins_s, ends_s, kinds_of in parts:
        kinds: list[str] = []
        at_s = begins_s + lots.expovariate(1 / every_s)
        while at_s < ends_s:
            kinds = kinds or lots.sample(sorted(kinds_of), len(kinds_of))
            kind = kinds.pop()
            whom, least_s, most_s = kinds_of[kind]
            for_s = min(lots.uniform(least_s, most_s), longest_s, ends_s - at_s)
            faults.append(Fault(at_s, kind, lots.choice(of[whom]), for_s, lots.random()))
            at_s += lots.expovariate(1 / every_s)
    return faults
