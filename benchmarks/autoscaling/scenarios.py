"""Pods and node groups of the scenarios, the fewest nodes that suffice, and the table of results.

A scenario is played in up to three forms. In form *plain*, pods and node templates have only GPUs,
so the autoscaler counts replicas. In form *mirror*, both also have the extended resource of the
in-tree mirror. Form *fixed* is the mirror plus the fix that the scenario names.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

GPU = "nvidia.com/gpu"
Form = Literal["plain", "mirror", "fixed"]
FORMS: tuple[Form, ...] = ("plain", "mirror", "fixed")
#: replicas: each GPU has as many replicas as pods fit on it. memory: pods require the label with
#: the memory of a GPU. groups: pods of each size select a node group of their own, with replicas
#: for that size. If several groups fit, they select the group with the smallest GPU.
Fix = Literal["replicas", "memory", "groups"]


@dataclass(frozen=True, slots=True)
class Group:
    """A node group whose nodes are all equal."""

    name: str
    memory_gib: int
    gpus: int = 1
    replicas: int = 8
    resource: str = GPU
    tainted: bool = False
    cpus: int = 8

    @property
    def sum_mib(self) -> int:
        return 1024 * self.memory_gib * self.gpus


@dataclass(frozen=True, slots=True)
class Pods:
    """Equal pods with one GPU each."""

    count: int
    #: GiB, a share such as "25%", or None for a pod without an annotation.
    vram: int | str | None
    tolerates: bool = False
    resource: str = GPU
    #: Name of the only group that they select; empty for any group.
    group: str = ""

    @property
    def annotation(self) -> str | None:
        return f"{self.vram}Gi" if isinstance(self.vram, int) else self.vram

    def gib_on(self, group: Group) -> float:
        """Return the memory that one pod takes on a GPU of the group."""
        match self.vram:
            case int():
                return self.vram
            case None:
                return group.memory_gib / group.replicas
            case share:
                return group.memory_gib * int(share.rstrip("%")) / 100

    def may_use(self, group: Group) -> bool:
        return (
            self.resource == group.resource
            and self.gib_on(group) <= group.memory_gib
            and (self.tolerates or not group.tainted)
            and self.group in ("", group.name)
        )


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    groups: tuple[Group, ...]
    pods: tuple[Pods, ...]
    fixes: tuple[Fix, ...] = ()
    #: Seconds from the creation of the Node until its GPUs and their memory are reported.
    late_s: float = 0.0
    #: Whether all pods that may use a GPU have one size, and each device takes only one size.
    one_size: bool = False

    def fixed(self) -> "Scenario":
        """Return the scenario with its fixes, except for labels, which the manifests add."""
        groups, pods = self.groups, self.pods
        if "groups" in self.fixes and len(groups) > 1:
            pods = tuple(replace(each, group=_smallest_for(each, groups).name) for each in pods)
        elif "groups" in self.fixes:
            (group,) = groups
            groups = tuple(
                replace(group, name=f"{group.name}-{each.vram}", replicas=_slots(each, group))
                for each in pods
            )
            pods = tuple(replace(p, group=g.name) for p, g in zip(pods, groups, strict=True))
        elif "replicas" in self.fixes:
            groups = tuple(replace(g, replicas=_slots(_user_of(g, pods), g)) for g in groups)
        return replace(self, groups=groups, pods=pods)


def _user_of(group: Group, pods: Sequence[Pods]) -> Pods:
    return next(each for each in pods if each.may_use(group))


def _smallest_for(pods: Pods, groups: Sequence[Group]) -> Group:
    return min(filter(pods.may_use, groups), key=lambda group: group.memory_gib)


def _slots(pods: Pods, group: Group) -> int:
    return int(group.memory_gib // pods.gib_on(group))


def fewest_nodes(scenario: Scenario) -> tuple[int, int]:
    """Return how many pods fit if nodes are added, and the fewest nodes (first-fit decreasing)."""
    nodes: list[tuple[Group, list[list[float]]]] = []
    placed = 0
    for pods in sorted(scenario.pods, key=lambda p: -max(map(p.gib_on, scenario.groups))):
        allowed = [group for group in scenario.groups if pods.may_use(group)]
        if not allowed:
            continue
        for _ in range(pods.count):
            placed += 1
            if not _put(pods, nodes):
                smallest = min(allowed, key=lambda g: (g.memory_gib, g.gpus))
                nodes.append((smallest, [[] for _ in range(smallest.gpus)]))
                _put(pods, nodes[-1:])
    return placed, len(nodes)


def _put(pods: Pods, nodes: Sequence[tuple[Group, list[list[float]]]]) -> bool:
    for group, devices in nodes:
        if not pods.may_use(group):
            continue
        size = pods.gib_on(group)
        for held in devices:
            if len(held) < group.replicas and sum(held) + size <= group.memory_gib:
                held.append(size)
                return True
    return False


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one form of a scenario."""

    #: Nodes that the autoscaler added -> number of pods on each.
    nodes: Mapping[str, int]
    bound: int
    #: Number of pods that some group could take.
    fitting: int

    @property
    def unused(self) -> int:
        return sum(pods == 0 for pods in self.nodes.values())

    @property
    def waiting(self) -> int:
        """Number of pods that wait although a node of some group would take them."""
        return self.fitting - self.bound

    @property
    def text(self) -> str:
        return f"{len(self.nodes)} / {self.unused} / {self.waiting}"


def table(
    scenarios: Sequence[Scenario], outcomes: Mapping[tuple[str, Form], Outcome]
) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield "| scenario | pods | fit | needed | plain | mirror | fixed | fix |"
    yield "|---|---|---|---|---|---|---|---|"
    for scenario in scenarios:
        fitting, needed = fewest_nodes(scenario)
        cells = [
            outcome.text if (outcome := outcomes.get((scenario.name, form))) else "-"
            for form in FORMS
        ]
        pods = sum(each.count for each in scenario.pods)
        row = [scenario.name, pods, fitting, needed, *cells, " and ".join(scenario.fixes) or "-"]
        yield f"| {' | '.join(map(str, row))} |"


def failures(
    scenarios: Sequence[Scenario], outcomes: Mapping[tuple[str, Form], Outcome]
) -> list[str]:
    """Return the scenarios of one size whose best form has unused nodes or waiting pods."""
    found = []
    for scenario in scenarios:
        form: Form = "fixed" if scenario.fixes else "mirror"
        outcome = outcomes.get((scenario.name, form))
        if scenario.one_size and outcome and (outcome.unused or outcome.waiting):
            found.append(
                f"{scenario.name}, {form}: {outcome.unused} unused nodes, "
                f"{outcome.waiting} pods wait"
            )
    return found


_MIG = "nvidia.com/mig-1g.10gb"
_SHARED_MIG = "nvidia.com/mig-3g.40gb.shared"
_L4, _L4X4, _L4X8 = Group("l4", 24), Group("l4x4", 24, gpus=4), Group("l4x8", 24, gpus=8)
_A100X2, _H100 = Group("a100x2", 80, gpus=2, cpus=32), Group("h100", 80, cpus=16)
_L40S = Group("l40s", 48, cpus=12)


def _one(name: str, group: Group, pods: Pods, *fixes: Fix) -> Scenario:
    return Scenario(name, (group,), (pods,), fixes, one_size=True)


SCENARIOS = (
    _one("10 x 20 GiB, one L4 a node", _L4, Pods(10, 20)),
    _one("12 x 8 GiB, one L4 a node", _L4, Pods(12, 8)),
    _one("12 x 7 GiB, one L4 a node", _L4, Pods(12, 7)),
    _one("16 x 5 GiB, one L4 a node", _L4, Pods(16, 5)),
    _one("8 x 20 GiB, four L4 a node", _L4X4, Pods(8, 20)),
    _one("12 x 16 GiB, four L4 a node", _L4X4, Pods(12, 16), "replicas"),
    _one("12 x 13 GiB, eight L4 a node", _L4X8, Pods(12, 13), "replicas"),
    _one("24 x 7 GiB, four L4 a node", _L4X4, Pods(24, 7), "replicas"),
    _one("40 x 5 GiB, eight L4 a node", _L4X8, Pods(40, 5), "replicas"),
    _one("4 x 60 GiB, two A100 a node", _A100X2, Pods(4, 60)),
    _one("6 x 45 GiB, two A100 a node", _A100X2, Pods(6, 45), "replicas"),
    Scenario("6 x 16 and 6 x 8 GiB, one L4", (_L4,), (Pods(6, 16), Pods(6, 8)), ("groups",)),
    Scenario("5 x 20 and 10 x 4 GiB, one L4", (_L4,), (Pods(5, 20), Pods(10, 4)), ("groups",)),
    Scenario("8 x 16 and 8 x 8 GiB, four L4", (_L4X4,), (Pods(8, 16), Pods(8, 8)), ("groups",)),
    Scenario("6 x 20 and 12 x 6 GiB, four L4", (_L4X4,), (Pods(6, 20), Pods(12, 6)), ("groups",)),
    Scenario(
        "4 x 50 and 8 x 20 GiB, two A100", (_A100X2,), (Pods(4, 50), Pods(8, 20)), ("groups",)
    ),
    Scenario("3 x 30 GiB, one L4: too large", (_L4,), (Pods(3, 30),)),
    Scenario("3 x 30 GiB, four L4: too large", (_L4X4,), (Pods(3, 30),), ("memory",)),
    Scenario(
        "2 x 90 GiB, eight L4 or two A100: too large", (_L4X8, _A100X2), (Pods(2, 90),), ("memory",)
    ),
    Scenario("4 x 50 GiB, eight L4 or two A100", (_L4X8, _A100X2), (Pods(4, 50),), ("memory",)),
    Scenario("4 x 40 GiB, one L4 or one H100", (_L4, _H100), (Pods(4, 40),)),
    Scenario(
        "6 x 20, 3 x 44, 2 x 70 GiB, one L4, L40S or H100",
        (_L4, _L40S, _H100),
        (Pods(6, 20), Pods(3, 44), Pods(2, 70)),
        ("groups",),
    ),
    Scenario(
        "6 x 10 and 2 x 60 GiB, one L4 or one H100",
        (_L4, _H100),
        (Pods(6, 10), Pods(2, 60)),
        ("groups",),
    ),
    _one("8 x 25 %, one L4 a node", _L4, Pods(8, "25%"), "replicas"),
    _one("16 without an annotation, one L4 a node", _L4, Pods(16, None)),
    _one("10 x 50 %, four L4 a node", _L4X4, Pods(10, "50%"), "replicas"),
    _one(
        "10 x 8 GiB, seven MIG 1g.10gb a node",
        Group("mig", 10, gpus=7, replicas=1, resource=_MIG),
        Pods(10, 8, resource=_MIG),
    ),
    _one(
        "6 x 25 GiB, two shared MIG 3g.40gb a node",
        Group("mig-shared", 40, gpus=2, replicas=4, resource=_SHARED_MIG),
        Pods(6, 25, resource=_SHARED_MIG),
        "replicas",
    ),
    Scenario(
        "4 x 20 GiB, one L4, some groups with a taint",
        (replace(_L4, name="l4-tainted", tainted=True), _L4),
        (Pods(2, 20), Pods(2, 20, tolerates=True)),
    ),
    Scenario(
        "4 x 40 GiB, one L4, or H100 with a taint: too large",
        (_L4, replace(_H100, tainted=True)),
        (Pods(4, 40),),
    ),
    Scenario("4 x 20 GiB, one L4, reported 20 s late", (_L4,), (Pods(4, 20),), late_s=20.0),
)
