"""What only the API server can say of our own node: its labels, the kubelet's live configuration
and the uids that static pods have there.

Every one of these is optional. The rights for the second and third are not given by default (the
kubelet's configuration needs ``nodes/proxy``, a right to do much more), and one that is
missing makes its part absent, no more. Asked seldom: nothing here moves.
"""

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from agent.kube.client import ApiServer
from agent.kube.requests import NotReached, request
from agent.probes.cgroup import is_static
from agent.probes.readings import (
    TOPOLOGY_POLICIES,
    HoldingReading,
    MirrorReading,
    PluginReading,
    Reading,
    SourceReading,
    TopologyReading,
)
from contract.annotations import (
    DEVICE_CHOICE,
    MAINTENANCE,
    RESERVE,
    parse_device_choice,
    parse_maintenance,
    parse_reserve,
)
from contract.errors import BadAnnotation
from contract.gpunode import MAX_REPLICAS, Sharing

LABELS = "labels"
CONFIGZ = "configz"
K3S = "k3s"
MIRRORS = "mirrors"

_T = TypeVar("_T")

_EVERY_S = 60.0
#: Where k3s writes its arguments and those of its file, as a list in JSON.
_K3S_ARGUMENTS = "k3s.io/node-args"
_OPERATOR_LABEL = "nvidia.com/gpu.deploy.device-plugin"
_HASH_ANNOTATION = "kubernetes.io/config.hash"
_SHARING: dict[str, Sharing] = {
    "none": "none",
    "time-slicing": "time-slicing",
    "time-sharing": "time-slicing",  # GKE's word
    "mps": "mps",
}


class _Metadata(msgspec.Struct):
    uid: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class _Object(msgspec.Struct):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)


class _KubeletConfig(msgspec.Struct, rename="camel"):
    topology_manager_policy: str = "none"


class _Configz(msgspec.Struct):
    kubeletconfig: _KubeletConfig


class _Refused(Exception):
    """The text is constant for one cause."""


class NodeApi:
    def __init__(
        self,
        server: ApiServer,
        node: str,
        monotonic_s: Callable[[], float] = time.monotonic,
        timeout_s: float = 3.0,
    ) -> None:
        self._server = server
        self._node = node
        self._monotonic_s = monotonic_s
        self._timeout_s = timeout_s
        self._due_s = float("-inf")
        self._last: list[Reading] = []
        #: Hash of a static pod -> what the API knows of it; None where it could not be learned.
        self._mirrors: dict[str, MirrorReading | None] = {}
        self._rejected = ""
        self._reached = False
        #: Why the agent has to leave the driver alone; empty: it need not.
        self.maintenance = ""
        #: What the node's annotation keeps free on every device; None where it is not known.
        self.reserve_bytes: int | None = None
        #: The node's annotation of that name, "" for none; None if it is not known, or is no mode.
        self.device_choice: str | None = None

    def read(self) -> Iterable[Reading]:
        now_s = self._monotonic_s()
        if now_s >= self._due_s:
            self._last = self._labels()
            if self._reached:  # else one wait is enough
                self._last = [*self._last, *self._configz()]
            # Those that could not be learned are asked for again.
            self._mirrors = {uid: found for uid, found in self._mirrors.items() if found}
            self._due_s = now_s + _EVERY_S
        return self._last

    def follow(self, readings: Sequence[Reading]) -> Iterable[Reading]:
        """The uids of the static pods among those that hold devices."""
        wanted = {
            r.uid: (r.namespace, r.name)
            for r in readings
            if isinstance(r, HoldingReading) and is_static(r.uid) and r.name
        }
        if not wanted:
            self._mirrors.clear()
            return []
        for uid, name in wanted.items():
            if uid not in self._mirrors:
                self._mirrors[uid] = self._mirror(uid, *name)
        found = [self._mirrors[uid] for uid in wanted]
        source = SourceReading(MIRRORS)
        if not all(found):
            why = f"uids of static pods are not known: {self._rejected}"
            source = SourceReading(MIRRORS, "degraded", why)
        return [*(each for each in found if each is not None), source]

    def _labels(self) -> list[Reading]:
        try:
            node = self._get(f"/api/v1/nodes/{self._node}", _Object)
        except _Refused as err:
            return [SourceReading(LABELS, "absent", str(err))]
        try:
            self.reserve_bytes = parse_reserve(node.metadata.annotations.get(RESERVE, "0"))
        except BadAnnotation:
            self.reserve_bytes = None  # the extender says what is wrong with it
        choice = node.metadata.annotations.get(DEVICE_CHOICE, "")
        try:
            self.device_choice = choice and parse_device_choice(choice).value
        except BadAnnotation:
            self.device_choice = None
        self.maintenance = of_maintenance(node.metadata.labels, node.metadata.annotations)
        reading = of_labels(node.metadata.labels)
        found = [reading, of_k3s(node.metadata.annotations)]
        return [SourceReading(LABELS), *(each for each in found if each is not None)]

    def _configz(self) -> list[Reading]:
        try:
            found = self._get(f"/api/v1/nodes/{self._node}/proxy/configz", _Configz)
        except _Refused as err:
            return [SourceReading(CONFIGZ, "absent", str(err))]
        policy = found.kubeletconfig.topology_manager_policy
        if policy and policy not in TOPOLOGY_POLICIES:
            why = "it names no policy of the topology manager that is known"
            return [SourceReading(CONFIGZ, "degraded", why)]
        return [SourceReading(CONFIGZ), TopologyReading(CONFIGZ, policy)]

    def _mirror(self, uid: str, namespace: str, name: str) -> MirrorReading | None:
        try:
            pod = self._get(f"/api/v1/namespaces/{namespace}/pods/{name}", _Object)
        except _Refused as err:
            self._rejected = str(err)
            return None
        if pod.metadata.annotations.get(_HASH_ANNOTATION) != uid:
            self._rejected = "the pod of that name is another one"
            return None
        return MirrorReading(MIRRORS, uid, pod.metadata.uid, namespace, name)

    def _get(self, path: str, kind: type[_T]) -> _T:
        try:
            answer = request(self._server, "GET", path, self._timeout_s)
        except NotReached as err:
            self._reached = False
            raise _Refused("API server is not reached") from err
        self._reached = True
        if answer.status != 200:
            raise _Refused(f"API server answers {answer.status}")
        try:
            return msgspec.json.decode(answer.data, type=kind)
        except (ValueError, RecursionError) as err:  # msgspec raises UnicodeDecodeError too
            raise _Refused("API server's answer cannot be read") from err


def of_maintenance(labels: Mapping[str, str], annotations: Mapping[str, str]) -> str:
    """Why the agent has to leave the driver alone; empty where nothing says that.

    The GPU Operator pauses what uses the driver by such a value of its label, for as long as it
    upgrades the driver or changes MIG.
    """
    deploy = labels.get(_OPERATOR_LABEL, "true")
    if deploy.startswith("paused"):
        return f"label {_OPERATOR_LABEL} is {deploy}"
    with contextlib.suppress(BadAnnotation):  # admission warns of another value
        if parse_maintenance(annotations.get(MAINTENANCE, "false")):
            return f"annotation {MAINTENANCE} is true"
    return ""


def of_k3s(annotations: Mapping[str, str]) -> TopologyReading | None:
    """The policy in the arguments that k3s hands to its kubelet; None where there is none to see.

    The flag is absent: the kubelet's default, unless its files say otherwise.
    """
    try:
        arguments = msgspec.json.decode(annotations.get(_K3S_ARGUMENTS, ""), type=list[str])
    except (ValueError, RecursionError):  # msgspec raises UnicodeDecodeError too
        return None
    policies = [
        value
        for each in arguments
        for name, _, value in [each.removeprefix("--kubelet-arg=").partition("=")]
        if name == "topology-manager-policy"
    ]
    policy = policies[-1] if policies else "none"
    source = K3S if policies else f"{K3S}-default"
    return TopologyReading(source, policy) if policy in TOPOLOGY_POLICIES else None


def of_labels(labels: Mapping[str, str]) -> PluginReading | None:
    """What GFD's labels, or GKE's, tell of the plugin; None where there are none.

    Of a node with several models they describe one at random, so they are the last to be believed.
    """
    told = labels.get("nvidia.com/gpu.sharing-strategy")
    count = labels.get("nvidia.com/gpu.replicas", "")
    renamed = not labels.get("nvidia.com/gpu.product", "").endswith("-SHARED")
    gke = labels.get("cloud.google.com/gke-gpu-sharing-strategy")
    if told is None and gke is not None:
        told, count = gke, labels.get("cloud.google.com/gke-max-shared-clients-per-gpu", "")
        renamed = False
    sharing = _SHARING.get(told or "")
    if sharing is None:
        return None
    replicas: dict[str, int] = {}
    if sharing != "none" and re.fullmatch(r"[0-9]{1,9}", count) and 1 < int(count) <= MAX_REPLICAS:
        replicas["nvidia.com/gpu.shared" if renamed else "nvidia.com/gpu"] = int(count)
    return PluginReading(
        LABELS,
        sharing,
        replicas,
        fail_requests_greater_than_one=True if gke is not None and sharing != "none" else None,
    )
