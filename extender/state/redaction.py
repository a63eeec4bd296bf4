"""Redacts names from recorded inputs, so that they can be replayed without revealing who runs what.

Names become numbers in the order of the names. This keeps every order by name, and the same state
always yields the same output. Fields that no decision depends on are dropped, not renamed. Messages
of agents are dropped because they may contain names.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

import msgspec

from contract.annotations import (
    DEVICE_CHOICE,
    MAX_SM,
    POLICY,
    PROCESSES,
    RESERVE,
    VRAM,
)
from contract.gate import GATE, is_whole, repository
from contract.gpunode import Charge, Device, GPUNode, GPUNodeStatus, PodUse, Reservation
from contract.kube import (
    Container,
    EnvFromSource,
    InitContainer,
    Node,
    NodeSpec,
    NodeStatus,
    ObjectMeta,
    OwnerReference,
    Pod,
    PodSpec,
    PodStatus,
    ResourceRequirements,
)
from extender.placement.policy import Rules
from extender.placement.visible_devices import VISIBLE_DEVICES
from extender.state.dump import Decided, NodeFacts, Settled, SmHistory

C = TypeVar("C", bound=Container)

#: Prefixes of node labels that describe the GPUs of the node.
_GPU_LABELS = (
    "nvidia.com/",
    "cloud.google.com/gke-",
    "karpenter.k8s.aws/instance-gpu-",
    "eks.amazonaws.com/instance-gpu-",
    "node.kubernetes.io/instance-type",
)
_NODE_ANNOTATIONS = (RESERVE, DEVICE_CHOICE)
_POD_ANNOTATIONS = (POLICY, MAX_SM, PROCESSES)


class Redaction:
    """``nodes``, ``pods`` and ``namespaces`` are complete lists, in any order."""

    def __init__(
        self, rules: Rules, nodes: Iterable[str], pods: Iterable[Pod], namespaces: Iterable[str]
    ) -> None:
        self._rules = rules
        self._names: dict[tuple[str, str], str] = {}
        known = sorted(pods, key=lambda pod: (pod.metadata.namespace, pod.metadata.name))
        spaces = {pod.metadata.namespace for pod in known} | set(namespaces)
        for kind, names in (("node", nodes), ("ns", spaces)):
            for name in sorted(names):
                self.of(kind, name)
        for pod in known:
            self.of("pod", f"{pod.metadata.namespace}/{pod.metadata.name}")
            self.of("uid", pod.metadata.uid)

    def of(self, kind: str, name: str) -> str:
        """Return the replacement of the name; an empty name stays empty."""
        if not name:
            return ""
        return self._names.setdefault((kind, name), f"{kind}-{len(self._names):06d}")

    def settled(self, of: Settled) -> Settled:
        namespaces = {
            self.of("ns", name): self._amount(text) for name, text in of.namespaces.items()
        }
        rules = replace(of.rules, gate_image=self._image(of.rules.gate_image))
        return msgspec.structs.replace(of, namespaces=namespaces, rules=rules)

    def facts(self, of: NodeFacts) -> NodeFacts:
        return NodeFacts(
            name=self.of("node", of.name),
            node=self._node(of.node) if of.node else None,
            gpunode=self._gpunode(of.gpunode) if of.gpunode else None,
            heard_at_s=of.heard_at_s,
            manager=of.manager,
            backs_off=of.backs_off,
            binding=self._reservations(of.binding),
            history=[
                SmHistory(self.of("gpu", sm.gpu), sm.instance, sm.activity) for sm in of.history
            ],
        )

    def pod(self, of: Pod) -> Pod:
        """Redact a pod from which values of environment variables are already removed."""
        spec, status, metadata = of.spec, of.status, of.metadata
        annotations = {key: text for key in _POD_ANNOTATIONS if (text := _word(of.annotation(key)))}
        if (vram := of.annotation(VRAM)) is not None:
            annotations[VRAM] = self._amount(vram)
        owners = [
            OwnerReference(kind=owner.kind, controller=owner.controller)
            for owner in metadata.owner_references or ()
        ]
        return Pod(
            metadata=ObjectMeta(
                name=self.of("pod", f"{metadata.namespace}/{metadata.name}"),
                namespace=self.of("ns", metadata.namespace),
                uid=self.of("uid", metadata.uid),
                resource_version=metadata.resource_version,
                annotations=annotations or None,
                owner_references=owners or None,
                deletion_timestamp=metadata.deletion_timestamp,
                creation_timestamp=metadata.creation_timestamp,
            ),
            spec=PodSpec(
                containers=self._containers(spec.containers),
                init_containers=self._containers(spec.init_containers),
                node_name=self.of("node", of.node) or None,
                priority=spec.priority,
            ),
            status=None
            if status is None
            else PodStatus(
                phase=status.phase,
                container_statuses=[
                    msgspec.structs.replace(one, name=self._container_name(one.name))
                    for one in status.container_statuses or ()
                ]
                or None,
                init_container_statuses=[
                    msgspec.structs.replace(one, name=self._container_name(one.name))
                    for one in status.init_container_statuses or ()
                ]
                or None,
            ),
        )

    def decided(self, of: Decided) -> Decided:
        pod = self.pod(of.pod)
        which = f"{pod.metadata.uid}.{pod.metadata.resource_version}"
        return msgspec.structs.replace(of, pod=pod, decision_id=which)

    def _amount(self, text: str) -> str:
        """Replace the container names in a VRAM annotation. An invalid amount becomes "?", which is
        invalid as well."""
        parts = []
        for part in text.split(","):
            name, equals, amount = part.rpartition("=")
            parts.append(f"{self.of('c', name.strip())}{equals}{_word(amount.strip()) or '?'}")
        return ",".join(parts)

    def _container_name(self, name: str) -> str:
        return name if name == GATE else self.of("c", name)

    def _containers(self, of: list[C] | None) -> list[C] | None:
        return None if of is None else [self._container(each) for each in of]

    def _container(self, of: C) -> C:
        if isinstance(of, InitContainer) and is_whole(of):
            return msgspec.structs.replace(of, image=self._image(of.image))
        asked = of.resources
        sources = [
            EnvFromSource(prefix=each.prefix if VISIBLE_DEVICES.startswith(each.prefix) else "-")
            for each in of.env_from or ()
        ]
        return type(of)(
            name=self._container_name(of.name),
            env=of.env,
            env_from=sources or None,
            resources=asked
            and ResourceRequirements(self._managed(asked.limits), self._managed(asked.requests)),
            restart_policy=of.restart_policy,
        )

    def _image(self, image: str) -> str:
        """Redact a gate's image. The tag is dropped because no decision depends on it."""
        return self.of("image", repository(image))

    def _managed(self, amounts: Mapping[str, str | int] | None) -> dict[str, str | int] | None:
        found = {name: n for name, n in (amounts or {}).items() if self._rules.manages(name)}
        return found or None

    def _node(self, of: Node) -> Node:
        labels = {
            key: text
            for key, text in (of.metadata.labels or {}).items()
            if key.startswith(_GPU_LABELS)
        }
        given = of.metadata.annotations or {}
        offered = of.status.allocatable if of.status else None
        name = self.of("node", of.metadata.name)
        return Node(
            metadata=ObjectMeta(
                name=name,
                uid=name,
                labels=labels or None,
                annotations={key: given[key] for key in _NODE_ANNOTATIONS if key in given} or None,
            ),
            spec=NodeSpec(unschedulable=of.spec.unschedulable) if of.spec else None,
            status=NodeStatus(allocatable=self._managed(offered)),
        )

    def _gpunode(self, of: GPUNode) -> GPUNode:
        name = self.of("node", of.name)
        status = of.status
        return GPUNode(
            metadata=ObjectMeta(name=name, uid=name, resource_version=of.metadata.resource_version),
            spec=msgspec.structs.replace(
                of.spec, reservations=self._reservations(of.spec.reservations)
            ),
            status=None
            if status is None
            else GPUNodeStatus(
                observed_at=status.observed_at,
                devices=[self._device(device) for device in status.devices],
                pods=[self._use(use) for use in status.pods],
                plugin=msgspec.structs.replace(status.plugin, source=""),
                sources=[msgspec.structs.replace(source, message="") for source in status.sources],
            ),
        )

    def _device(self, of: Device) -> Device:
        return msgspec.structs.replace(
            of,
            uuid=self.of("gpu", of.uuid),
            parent=self.of("gpu", of.parent) if of.parent else of.parent,
            health_reason="unhealthy" if of.health_reason else "",
            pci_bus_id="",
        )

    def _use(self, of: PodUse) -> PodUse:
        return PodUse(
            uid=self.of("uid", of.uid),
            device=self.of("gpu", of.device),
            namespace=self.of("ns", of.namespace),
            name=self.of("pod", f"{of.namespace}/{of.name}"),
            replica=self.of("replica", of.replica),
            used_bytes=of.used_bytes,
        )

    def _reservations(self, of: Mapping[str, Reservation]) -> dict[str, Reservation]:
        return {
            self.of("uid", uid): Reservation(
                namespace=self.of("ns", each.namespace),
                name=self.of("pod", f"{each.namespace}/{each.name}"),
                charges=[self._charge(charge) for charge in each.charges],
                since=each.since,
                flags=each.flags,
            )
            for uid, each in of.items()
        }

    def _charge(self, of: Charge) -> Charge:
        return msgspec.structs.replace(
            of,
            candidates={self.of("gpu", uuid): size for uuid, size in of.candidates.items()},
            beyond=[self.of("gpu", uuid) for uuid in of.beyond],
            choice=self.of("gpu", of.choice),
        )


def _word(text: str | None) -> str:
    """Return short plain text as it is, because it can hardly contain a secret; "?" otherwise."""
    if text is None:
        return ""
    return text if re.fullmatch(r"[+-]?[0-9a-zA-Z.]{1,16}%?", text) else "?"
