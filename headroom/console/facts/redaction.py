"""Redacts recorded inputs so that they can be replayed but do not show which user runs which pod.

Each name becomes a number. The numbers follow the alphabetical order of the names, so sorting by
name gives the same order as before, and the same state always yields the same output. Fields that
no decision depends on are dropped, and so are messages of agents, because they may contain names.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

import msgspec

from headroom.contract.annotations import (
    CORDON,
    DEVICE_CHOICE,
    MAX_SM,
    ON_OVERUSE,
    POLICY,
    PROCESSES,
    RESERVE,
    STARTUP,
    STARTUP_TIMEOUT,
    VRAM,
    VRAM_LIMIT,
    parse_cordon,
)
from headroom.contract.errors import BadAnnotation
from headroom.contract.foreign_keys import VISIBLE_DEVICES
from headroom.contract.gate import GATE, is_whole, repository
from headroom.contract.gpunode import Charge, Device, GPUNode, GPUNodeStatus, PodUse, Reservation
from headroom.contract.kube import (
    Container,
    ContainerStatus,
    EnvFromSource,
    ExtendedResourceClaimStatus,
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
from headroom.core.journal.dump import Decided, NodeFacts, Settled, SmHistory
from headroom.core.placement.policy import Rules

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
_POD_ANNOTATIONS = (POLICY, MAX_SM, PROCESSES, ON_OVERUSE, STARTUP, STARTUP_TIMEOUT)


class Redaction:
    """Redacts inputs. ``nodes``, ``pods`` and ``namespaces`` are complete lists, in any order."""

    def __init__(
        self, rules: Rules, nodes: Iterable[str], pods: Iterable[Pod], namespaces: Iterable[str]
    ) -> None:
        self._rules = rules
        self._names: dict[tuple[str, str], str] = {}
        known = sorted(pods, key=lambda pod: (pod.metadata.namespace, pod.metadata.name))
        spaces = {pod.metadata.namespace for pod in known} | set(namespaces)
        for kind, names in (("node", nodes), ("ns", spaces)):
            for name in sorted(names):
                self.alias(kind, name)
        for pod in known:
            self._pod_name(pod.metadata)
            self.alias("uid", pod.metadata.uid)

    def alias(self, kind: str, name: str) -> str:
        """Return the replacement of the name. An empty name stays empty."""
        if not name:
            return ""
        return self._names.setdefault((kind, name), f"{kind}-{len(self._names):06d}")

    def _pod_name(self, of: ObjectMeta | PodUse | Reservation) -> str:
        return self.alias("pod", f"{of.namespace}/{of.name}")

    def settled(self, original: Settled) -> Settled:
        namespaces = {
            self.alias("ns", name): self._amount(text) for name, text in original.namespaces.items()
        }
        rules = replace(original.rules, gate_image=self._image(original.rules.gate_image))
        return msgspec.structs.replace(
            original,
            namespaces=namespaces,
            rules=rules,
            exempt=[self.alias("ns", name) for name in original.exempt],
            dra_resources=list(filter(self._rules.manages, original.dra_resources)),
        )

    def facts(self, original: NodeFacts) -> NodeFacts:
        return NodeFacts(
            name=self.alias("node", original.name),
            node=self._node(original.node) if original.node else None,
            gpunode=self._gpunode(original.gpunode) if original.gpunode else None,
            reported_at_s=original.reported_at_s,
            manager=original.manager,
            backs_off=original.backs_off,
            binding=self._reservations(original.binding),
            history=[
                SmHistory(self.alias("gpu", sm.gpu), sm.instance, sm.activity)
                for sm in original.history
            ],
        )

    def pod(self, original: Pod) -> Pod:
        """Redact a pod from which values of environment variables are already removed."""
        spec, status, metadata = original.spec, original.status, original.metadata
        annotations = {
            key: text for key in _POD_ANNOTATIONS if (text := _word(original.annotation(key)))
        }
        for key in (VRAM, VRAM_LIMIT):
            if (amount := original.annotation(key)) is not None:
                annotations[key] = self._amount(amount)
        owners = [
            OwnerReference(kind=owner.kind, controller=owner.controller)
            for owner in metadata.owner_references or ()
        ]
        return Pod(
            metadata=ObjectMeta(
                name=self._pod_name(metadata),
                namespace=self.alias("ns", metadata.namespace),
                uid=self.alias("uid", metadata.uid),
                resource_version=metadata.resource_version,
                annotations=annotations or None,
                owner_references=owners or None,
                deletion_timestamp=metadata.deletion_timestamp,
                creation_timestamp=metadata.creation_timestamp,
            ),
            spec=PodSpec(
                containers=self._containers(spec.containers),
                init_containers=self._containers(spec.init_containers),
                node_name=self.alias("node", original.node) or None,
                priority=spec.priority,
            ),
            status=None
            if status is None
            else PodStatus(
                phase=status.phase,
                container_statuses=self._statuses(status.container_statuses),
                init_container_statuses=self._statuses(status.init_container_statuses),
                extended_resource_claim_status=self._claim(status.extended_resource_claim_status),
            ),
        )

    def _claim(
        self, original: ExtendedResourceClaimStatus | None
    ) -> ExtendedResourceClaimStatus | None:
        """Keep only the managed resources that the claim serves."""
        if original is None:
            return None
        served = [
            each
            for each in original.request_mappings or ()
            if self._rules.manages(each.resource_name)
        ]
        return ExtendedResourceClaimStatus("claim", served)

    def _statuses(self, original: list[ContainerStatus] | None) -> list[ContainerStatus] | None:
        return original and [
            msgspec.structs.replace(each, name=self._container_name(each.name)) for each in original
        ]

    def decided(self, original: Decided) -> Decided:
        pod = self.pod(original.pod)
        which = f"{pod.metadata.uid}.{pod.metadata.resource_version}"
        return msgspec.structs.replace(original, pod=pod, decision_id=which)

    def _amount(self, text: str) -> str:
        """Replace the container names in a VRAM annotation. An amount that is not short plain text
        is invalid. It becomes "?", which is invalid too."""
        parts = []
        for part in text.split(","):
            name, equals, amount = part.rpartition("=")
            parts.append(f"{self.alias('c', name.strip())}{equals}{_word(amount.strip()) or '?'}")
        return ",".join(parts)

    def _container_name(self, name: str) -> str:
        return name if name == GATE else self.alias("c", name)

    def _containers(self, original: list[C] | None) -> list[C] | None:
        return None if original is None else [self._container(each) for each in original]

    def _container(self, original: C) -> C:
        if isinstance(original, InitContainer) and is_whole(original):
            return msgspec.structs.replace(original, image=self._image(original.image))
        resources = original.resources
        sources = [
            EnvFromSource(prefix=each.prefix if VISIBLE_DEVICES.startswith(each.prefix) else "-")
            for each in original.env_from or ()
        ]
        return type(original)(
            name=self._container_name(original.name),
            env=original.env,
            env_from=sources or None,
            resources=resources
            and ResourceRequirements(
                self._managed(resources.limits), self._managed(resources.requests)
            ),
            restart_policy=original.restart_policy,
        )

    def _image(self, image: str) -> str:
        """Redact the image of a gate container. The tag is dropped, because no decision depends on
        it."""
        return self.alias("image", repository(image))

    def _managed(self, amounts: Mapping[str, str | int] | None) -> dict[str, str | int] | None:
        found = {name: n for name, n in (amounts or {}).items() if self._rules.manages(name)}
        return found or None

    def _cordoned(self, text: str) -> str:
        """Return the annotation with redacted UUIDs. An invalid annotation stays invalid."""
        try:
            return ",".join(sorted(self.alias("gpu", uuid) for uuid in parse_cordon(text)))
        except BadAnnotation:
            return "?"

    def _node(self, original: Node) -> Node:
        labels, given = original.metadata.labels or {}, original.metadata.annotations or {}
        labels = {key: text for key, text in labels.items() if key.startswith(_GPU_LABELS)}
        offered = original.status.allocatable if original.status else None
        name = self.alias("node", original.metadata.name)
        annotations = {key: given[key] for key in _NODE_ANNOTATIONS if key in given}
        if cordon := given.get(CORDON):
            annotations[CORDON] = self._cordoned(cordon)
        return Node(
            metadata=ObjectMeta(
                name=name,
                uid=name,
                labels=labels or None,
                annotations=annotations or None,
            ),
            spec=NodeSpec(unschedulable=original.spec.unschedulable) if original.spec else None,
            status=NodeStatus(allocatable=self._managed(offered)),
        )

    def _gpunode(self, original: GPUNode) -> GPUNode:
        name = self.alias("node", original.name)
        status = original.status
        return GPUNode(
            metadata=ObjectMeta(
                name=name, uid=name, resource_version=original.metadata.resource_version
            ),
            spec=msgspec.structs.replace(
                original.spec, reservations=self._reservations(original.spec.reservations)
            ),
            status=None
            if status is None
            else GPUNodeStatus(
                observed_at=status.observed_at,
                devices=[self._device(device) for device in status.devices],
                pods=[self._use(use) for use in status.pods],
                plugin=msgspec.structs.replace(status.plugin, source=""),
                sources=[
                    msgspec.structs.replace(source, message="", codes=[])
                    for source in status.sources
                ],
            ),
        )

    def _device(self, original: Device) -> Device:
        return msgspec.structs.replace(
            original,
            uuid=self.alias("gpu", original.uuid),
            parent=self.alias("gpu", original.parent) if original.parent else original.parent,
            health_reason="unhealthy" if original.health_reason else "",
            health_codes=[],
            pci_bus_id="",
        )

    def _use(self, original: PodUse) -> PodUse:
        return PodUse(
            uid=self.alias("uid", original.uid),
            device=self.alias("gpu", original.device),
            namespace=self.alias("ns", original.namespace),
            name=self._pod_name(original),
            container=original.container and self._container_name(original.container),
            replica=self.alias("replica", original.replica),
            used_bytes=original.used_bytes,
        )

    def _reservations(self, original: Mapping[str, Reservation]) -> dict[str, Reservation]:
        return {
            self.alias("uid", uid): Reservation(
                namespace=self.alias("ns", each.namespace),
                name=self._pod_name(each),
                charges=[self._charge(charge) for charge in each.charges],
                since=each.since,
                flags=each.flags,
            )
            for uid, each in original.items()
        }

    def _charge(self, original: Charge) -> Charge:
        return msgspec.structs.replace(
            original,
            candidates={self.alias("gpu", uuid): n for uuid, n in original.candidates.items()},
            beyond=[self.alias("gpu", uuid) for uuid in original.beyond],
            choices=[self.alias("gpu", uuid) for uuid in original.choices],
            containers=[
                msgspec.structs.replace(each, name=self._container_name(each.name))
                for each in original.containers
            ],
        )


def _word(text: str | None) -> str:
    """Return short plain text unchanged, because it is unlikely to contain a secret.

    Replace any other text by "?", and None by "".
    """
    if text is None:
        return ""
    return text if re.fullmatch(r"[+-]?[0-9a-zA-Z.]{1,16}%?", text) else "?"
