"""A model of the kubelet's device manager, which allocates replicas to containers and writes the
checkpoint.

The model follows each decision in pkg/kubelet/cm/devicemanager/manager.go of v1.36, for a node with
one resource of a device plugin. It makes no random choices itself. ``Lots`` chooses the plugin's
preference and the order of the kubelet's sets, so that a caller can draw choices, replay the
choices of a real node, or try all choices.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.standin import topology
from tests.standin.allocations import (
    NONE,
    RESOURCE,
    Allocated,
    Call,
    Checkpoint,
    Container,
    Entry,
    Ids,
    Lots,
    Pod,
    Preferred,
    Rejected,
    Unaligned,
    Verdict,
)
from tests.standin.plugin import Plugin, PluginRefused, Replica
from tests.standin.topology import TopologyPolicy


@dataclass
class DeviceManager:
    policy: TopologyPolicy = "none"
    numa_nodes: Sequence[int] = (0,)
    #: This function is called with the checkpoint after every write.
    save: Callable[[Checkpoint], None] = lambda checkpoint: None
    #: Calls that the plugin has received, oldest first.
    calls: list[Call] = field(default_factory=list)
    #: The last written checkpoint.
    written: Checkpoint | None = None
    #: Whether the kubelet has received its pods since it started.
    sources_ready: bool = True

    def __post_init__(self) -> None:
        self._plugin: Plugin | None = None
        self._listed: dict[str, Replica] = {}
        self._healthy: Ids | None = None
        self._unhealthy: Ids = NONE
        self._allocated: Ids = NONE
        #: The allocation of each container, by pod UID and container name.
        self._given: dict[str, dict[str, Entry]] = {}
        #: The UID of the last admitted pod, with the replicas that its ended init containers have
        #: released.
        self._reusable: dict[str, Ids] = {}

    # The methods below are actions of the plugin.

    def listed(self, plugin: Plugin) -> None:
        """Handle a list of replicas that the plugin sends after its registration or after a
        change.
        """
        self._plugin = plugin
        self._listed = {replica.id: replica for replica in plugin.listed()}
        self._healthy = frozenset(each.id for each in self._listed.values() if each.healthy)
        self._unhealthy = frozenset(self._listed) - self._healthy
        self._write()

    def disconnected(self) -> None:
        """Handle the end of the plugin's process. All replicas are unhealthy until the next
        registration.
        """
        self._plugin = None
        if self._healthy is not None:
            self._unhealthy |= self._healthy
            self._healthy = NONE

    def forgotten(self) -> None:
        """Remove the resource from the node, because the plugin has been gone for five minutes."""
        if self._plugin is None and self._healthy is not None:
            self._healthy, self._unhealthy = None, NONE
            self._write()

    # The methods below are actions of the kubelet.

    def restarted(self) -> None:
        """Start a new kubelet, which reads the checkpoint. The plugin has not registered with it
        yet.
        """
        written = self.written or Checkpoint()
        self._plugin = None
        self._listed = {}
        self._healthy = None if written.registered is None else NONE
        self._unhealthy = NONE
        self._reusable = {}
        self._given = {}
        for entry in written.entries:
            self._given.setdefault(entry.uid, {})[entry.container] = entry
        self._recount()
        self.sources_ready = False

    def admit(
        self, pod: Pod, active: Collection[str], lots: Lots, running: Collection[str] = ()
    ) -> Verdict:
        """Allocate replicas to each container, or reject the pod.

        ``active`` are the UIDs of the pods that the kubelet counts, including this pod. ``running``
        are the containers of this pod that the runtime listed when the kubelet started.
        """
        try:
            for container in pod.containers:
                hint = self._align(pod, container, active)
                self._allocate(pod, container, hint, active, lots, running)
        except Unaligned:
            message = "Resources cannot be allocated with Topology locality"
            return Verdict(False, "TopologyAffinityError", message)
        except (Rejected, PluginRefused) as why:
            message = f"Allocate failed due to {why}, which is unexpected"
            return Verdict(False, "UnexpectedAdmissionError", message)
        return Verdict(True)

    def collect(self, active: Collection[str]) -> None:
        """Free the replicas of pods that the kubelet no longer counts. The kubelet writes the
        checkpoint later.
        """
        if not self.sources_ready:
            return
        if gone := self._given.keys() - set(active):
            for uid in gone:
                del self._given[uid]
            self._recount()

    # The methods below return state that other programs can observe.

    def given(self, uid: str, container: str) -> Entry | None:
        return self._given.get(uid, {}).get(container)

    @property
    def available(self) -> Ids:
        return (self._healthy or NONE) - self._allocated

    @property
    def allocatable(self) -> list[Replica]:
        """Return the healthy replicas that PodResources lists."""
        return [each for each in self._listed.values() if each.id in (self._healthy or ())]

    @property
    def capacity(self) -> tuple[int, int] | None:
        """Return the capacity and the allocatable number in the node's status. Return None if the
        node does not have the resource.
        """
        if self._healthy is None:
            return None
        return len(self._healthy) + len(self._unhealthy), len(self._healthy)

    def is_healthy(self, replica: str) -> bool:
        """Return the health that the pod's status shows. A replica that the plugin does not list
        counts as healthy.
        """
        return replica not in self._listed or self._listed[replica].healthy

    def _align(self, pod: Pod, container: Container, active: Collection[str]) -> int | None:
        """Return a mask of the NUMA nodes for the container's devices, or None if any NUMA node is
        acceptable. Raise ``Unaligned`` if the policy rejects the container.
        """
        if self.policy == "none":
            return None
        proposed = None
        if container.replicas and self._knows():
            self.collect(active)
            proposed = self._hints(pod, container)
        hint, admitted = topology.merge(self.policy, proposed, self.numa_nodes)
        if not admitted:
            raise Unaligned
        return hint.mask

    def _hints(self, pod: Pod, container: Container) -> list[topology.Hint] | None:
        entry = self.given(pod.uid, container.name)
        if entry is None:
            return topology.hints(
                self._listed,
                self.available,
                self._reusable.get(pod.uid, NONE),
                container.replicas,
                self.numa_nodes,
            )
        return topology.hints(
            self._listed, entry.replicas, NONE, container.replicas, self.numa_nodes
        )

    def _knows(self) -> bool:
        return self._healthy is not None or bool(self._allocated)

    def _allocate(
        self,
        pod: Pod,
        container: Container,
        hint: int | None,
        active: Collection[str],
        lots: Lots,
        running: Collection[str],
    ) -> None:
        self._reusable = {pod.uid: self._reusable.get(pod.uid, NONE)}
        if container.replicas and self._knows():
            self.collect(active)
            chosen = self._choose(pod, container, hint, lots, running)
            if chosen:
                self._give(pod, container, chosen)
        entry = self.given(pod.uid, container.name)
        held = entry.replicas if entry else NONE
        if container.init and not container.sidecar:
            self._reusable[pod.uid] |= held
        else:
            self._reusable[pod.uid] -= held

    def _choose(
        self,
        pod: Pod,
        container: Container,
        hint: int | None,
        lots: Lots,
        running: Collection[str],
    ) -> Ids:
        """Return the replicas to request from the plugin. Return no replicas if the container
        already has its replicas.
        """
        entry = self.given(pod.uid, container.name)
        if entry and len(entry.replicas) != container.replicas:
            raise Rejected(
                f'pod "{pod.uid}" container "{container.name}" changed request for resource '
                f'"{RESOURCE}" from {len(entry.replicas)} to {container.replicas}'
            )
        if not self.sources_ready and container.name in running:
            return NONE
        if self._healthy is None:
            raise Rejected(f"cannot allocate unregistered device {RESOURCE}")
        unhealthy = f"cannot allocate unhealthy devices {RESOURCE}"
        if not self._healthy:
            raise Rejected(f"no healthy devices present; {unhealthy}")
        if entry and not entry.replicas <= self._healthy:
            raise Rejected(f"previously allocated devices are no longer healthy; {unhealthy}")
        if entry:
            return NONE
        return self._pick(container.replicas, self._reusable[pod.uid], hint, lots)

    def _pick(self, required: int, reusable: Ids, hint: int | None, lots: Lots) -> Ids:
        chosen: Ids = NONE

        def complete(replicas: Ids) -> bool:
            """Choose missing replicas from ``replicas``. Return whether no replica is missing any
            more.
            """
            nonlocal chosen
            fresh = replicas - chosen
            needed = required - len(chosen)
            chosen |= fresh if len(fresh) <= needed else lots.some(fresh, needed)
            self._allocated |= chosen
            return len(chosen) == required

        if complete(reusable):
            return chosen
        available = self.available
        needed = required - len(chosen)
        if len(available) < needed:
            raise Rejected(
                f"requested number of devices unavailable for {RESOURCE}. "
                f"Requested: {needed}, Available: {len(available)}"
            )
        aligned, unaligned, anywhere = self._by_affinity(available, hint)
        if needed < len(aligned):
            preferred = self._prefer(aligned | chosen, chosen, required, lots)
            if complete(preferred & aligned) or complete(aligned):
                return chosen
        if complete(aligned):
            return chosen
        preferred = self._prefer(available | chosen, chosen, required, lots)
        if complete(preferred & available) or complete(unaligned) or complete(anywhere):
            return chosen
        raise AssertionError("there are as many as are needed")

    def _by_affinity(self, available: Ids, hint: int | None) -> tuple[Ids, Ids, Ids]:
        """Split the replicas into replicas on the hint's NUMA nodes, on other NUMA nodes, and
        without a NUMA node.
        """
        if hint is None or all(each.numa is None for each in self._listed.values()):
            return NONE, NONE, available
        no_affinity = frozenset(each for each in available if self._listed[each].numa is None)
        aligned = frozenset(e for e in available if topology.within(self._listed[e], hint))
        return aligned, available - aligned - no_affinity, no_affinity

    def _prefer(self, available: Ids, must: Ids, size: int, lots: Lots) -> Ids:
        call = Preferred(available, must, size)
        self.calls.append(call)
        assert self._plugin is not None
        try:
            return lots.preferred(self._plugin, call)
        except PluginRefused as why:
            rpc = "device plugin GetPreferredAllocation rpc failed with err"
            raise Rejected(f"{rpc}: rpc error: code = Unknown desc = {why}") from None

    def _give(self, pod: Pod, container: Container, chosen: Ids) -> None:
        self.calls.append(Allocated(chosen))
        assert self._plugin is not None
        try:
            environment = self._plugin.allocate(chosen)
        except PluginRefused as why:
            self._recount()
            raise Rejected(f"rpc error: code = Unknown desc = {why}") from None
        by_numa: dict[int, set[str]] = {}
        for each in chosen:
            numa = self._listed[each].numa
            by_numa.setdefault(-1 if numa is None else numa, set()).add(each)
        self._given.setdefault(pod.uid, {})[container.name] = Entry(
            pod.uid,
            container.name,
            tuple((numa, frozenset(ids)) for numa, ids in sorted(by_numa.items())),
            tuple(environment.items()),
        )
        self._write()

    def _recount(self) -> None:
        self._allocated = held(self._given)

    def _write(self) -> None:
        entries = tuple(entry for given in self._given.values() for entry in given.values())
        self.written = Checkpoint(entries, self._healthy)
        self.save(self.written)


def held(given: Mapping[str, Mapping[str, Entry]]) -> Ids:
    return frozenset(
        replica for each in given.values() for entry in each.values() for replica in entry.replicas
    )


def pod(uid: str, *containers: int | Container, init: Iterable[int] = ()) -> Pod:
    """Return a pod whose containers request these numbers of replicas."""
    first = [Container(f"init-{n}", count, init=True) for n, count in enumerate(init)]
    rest = [
        each if isinstance(each, Container) else Container(f"main-{n}", each)
        for n, each in enumerate(containers)
    ]
    return Pod(uid, (*first, *rest), name=uid)
