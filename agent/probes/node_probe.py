"""Reads data about the agent's node from the API server, once a minute.

It reads the node's labels and annotations, the kubelet's live configuration, and the uids that
static pods have in the API. Each part is optional: if a permission is missing, only the part that
needs it is absent.

By default the agent may read neither pods nor the kubelet's configuration, because reading the
configuration requires the powerful permission ``nodes/proxy``. While the configuration is
forbidden, the agent tries to read it once an hour and does not report its source.
"""

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

import msgspec
import structlog

from agent.kube_client import ApiServer, NotReached, request
from agent.probes.cause import Cause
from agent.probes.cgroup import is_static
from agent.probes.readings import (
    TOPOLOGY_POLICIES,
    HoldingReading,
    KubeletVersionReading,
    MirrorReading,
    ObstacleReading,
    PluginReading,
    PoolReading,
    Reading,
    SourceReading,
    TopologyReading,
)
from headroom.contract.annotations import (
    DEVICE_CHOICE,
    MAINTENANCE,
    RESERVE,
    UNIFIED_MEMORY,
    parse_device_choice,
    parse_maintenance,
    parse_reserve,
    parse_unified_memory,
)
from headroom.contract.errors import BadAnnotation
from headroom.contract.gpunode import MAX_REPLICAS, Sharing
from headroom.contract.kube import ObjectMeta

_log = structlog.get_logger()

LABELS = "labels"
CONFIGZ = "configz"
K3S = "k3s"
MIRRORS = "mirrors"

_T = TypeVar("_T")

_EVERY_S = 60.0
#: Maximum length of the kubelet's version in a report.
_MAX_VERSION = 64
#: Seconds until a forbidden request is sent again.
_FORBIDDEN_S = 3600.0
#: Annotation in which k3s stores its arguments, as a JSON list.
_K3S_ARGUMENTS = "k3s.io/node-args"
_OPERATOR_LABEL = "nvidia.com/gpu.deploy.device-plugin"
_HASH_ANNOTATION = "kubernetes.io/config.hash"
_SHARING: dict[str, Sharing] = {
    "none": "none",
    "time-slicing": "time-slicing",
    "time-sharing": "time-slicing",  # GKE's name for it
    "mps": "mps",
}


class _Object(msgspec.Struct):
    metadata: ObjectMeta = ObjectMeta()


class _NodeInfo(msgspec.Struct, rename="camel", frozen=True):
    kubelet_version: str = ""


class _NodeStatus(msgspec.Struct, rename="camel", frozen=True):
    node_info: _NodeInfo = _NodeInfo()


class _Node(_Object):
    status: _NodeStatus = _NodeStatus()


class _KubeletConfig(msgspec.Struct, rename="camel"):
    topology_manager_policy: str = "none"


class _Configz(msgspec.Struct):
    kubeletconfig: _KubeletConfig


class _Failed(Exception):
    """A request failed. The text is the same while the cause is the same."""


class _Forbidden(_Failed):
    """The agent lacks the permission for a request."""


class NodeApi:
    """Reads the Node once a minute, and the mirror pods of static pods when they are needed.

    The public attributes contain the newest values of the Node. They keep their values while the
    API server cannot be reached.

    ``changing`` returns whether the Node may change at any moment. If so, it is read for every
    sample.
    """

    def __init__(
        self,
        server: ApiServer,
        node: str,
        monotonic_s: Callable[[], float] = time.monotonic,
        timeout_s: float = 3.0,
        changing: Callable[[], bool] = lambda: False,
    ) -> None:
        self._server = server
        self._node = node
        self._changing = changing
        self._monotonic_s = monotonic_s
        self._timeout_s = timeout_s
        self._due_s = self._configz_due_s = float("-inf")
        self._last: list[Reading] = []
        #: The mirror pod in the API for the hash of each static pod, or None if it could not be
        #: read.
        self._mirrors: dict[str, MirrorReading | None] = {}
        #: Why the last mirror pod could not be read.
        self._mirror_error = ""
        self._reached = False
        #: Why the agent must release the driver, or None if it need not release it.
        self.maintenance: Cause | None = None
        #: Memory that the node's annotation keeps free on every device, or None if unknown.
        self.reserve_bytes: int | None = None
        #: The node's device-choice annotation. Empty if it has none, and None if it is unknown or
        #: invalid.
        self.device_choice: str | None = None
        #: Version of the kubelet in the Node's status, such as v1.36.3. Empty if unknown.
        self.kubelet_version = ""

    def read(self) -> Iterable[Reading]:
        now_s = self._monotonic_s()
        if now_s >= self._due_s or self._changing():
            self._last = self._labels()
            # Do not wait for a second timeout if the server was not reached.
            if self._reached and now_s >= self._configz_due_s:
                self._last = [*self._last, *self._configz(now_s)]
            # Mirror pods that could not be read are requested again.
            self._mirrors = {uid: found for uid, found in self._mirrors.items() if found}
            self._due_s = now_s + _EVERY_S
        return self._last

    def follow(self, readings: Sequence[Reading]) -> Iterable[Reading]:
        """Return the API uid of each static pod that holds devices, and the state of the source.

        Return nothing if no static pod holds devices.
        """
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
            why = f"the uids of static pods are unknown: {self._mirror_error}"
            source = SourceReading(MIRRORS, "degraded", why)
        return [*(each for each in found if each is not None), source]

    def _labels(self) -> list[Reading]:
        """Read the Node. Set the attributes from its annotations, and return its readings."""
        try:
            node = self._get(f"/api/v1/nodes/{self._node}", _Node)
        except _Failed as err:
            return [SourceReading(LABELS, "absent", str(err))]
        labels, annotations = node.metadata.labels or {}, node.metadata.annotations or {}
        try:
            self.reserve_bytes = parse_reserve(annotations.get(RESERVE, "0"))
        except BadAnnotation:
            # The extender reports the error.
            self.reserve_bytes = None
        choice, obstacle = annotations.get(DEVICE_CHOICE, ""), None
        try:
            self.device_choice = choice and parse_device_choice(choice).value
        except BadAnnotation as err:
            self.device_choice = None
            obstacle = ObstacleReading(f"the node takes no GPU pods: {err}")
        self.maintenance = of_maintenance(labels, annotations)
        self.kubelet_version = node.status.node_info.kubelet_version[:_MAX_VERSION]
        version = KubeletVersionReading(self.kubelet_version)
        found = [of_labels(labels), of_k3s(annotations), obstacle, version, of_pool(annotations)]
        return [SourceReading(LABELS), *(each for each in found if each is not None)]

    def _configz(self, now_s: float) -> list[Reading]:
        try:
            found = self._get(f"/api/v1/nodes/{self._node}/proxy/configz", _Configz)
        except _Forbidden:  # this is the default and not an error
            self._configz_due_s = now_s + _FORBIDDEN_S
            return []
        except _Failed as err:
            return [SourceReading(CONFIGZ, "absent", str(err))]
        policy = found.kubeletconfig.topology_manager_policy
        if policy and policy not in TOPOLOGY_POLICIES:
            why = "this agent does not support its topology manager policy"
            return [SourceReading(CONFIGZ, "degraded", why)]
        return [SourceReading(CONFIGZ), TopologyReading(CONFIGZ, policy)]

    def _mirror(self, uid: str, namespace: str, name: str) -> MirrorReading | None:
        """Read the mirror pod of the static pod with this kubelet uid, and return None if this
        fails."""
        try:
            pod = self._get(f"/api/v1/namespaces/{namespace}/pods/{name}", _Object)
        except _Failed as err:
            self._mirror_error = str(err)
            return None
        if (pod.metadata.annotations or {}).get(_HASH_ANNOTATION) != uid:
            self._mirror_error = "the pod with this name is a different pod"
            return None
        return MirrorReading(MIRRORS, uid, pod.metadata.uid, namespace, name)

    def _get(self, path: str, kind: type[_T]) -> _T:
        """Request and decode one object. Raises ``_Failed``."""
        try:
            answer = request(self._server, "GET", path, self._timeout_s)
        except NotReached as err:
            self._reached = False
            raise _Failed("API server cannot be reached") from err
        self._reached = True
        if answer.status == 403:
            raise _Forbidden("API server answers 403")
        if answer.status != 200:
            raise _Failed(f"API server answers {answer.status}")
        try:
            return msgspec.json.decode(answer.data, type=kind)
        except (ValueError, RecursionError) as err:  # msgspec raises UnicodeDecodeError too
            raise _Failed("API server's answer cannot be read") from err


def of_maintenance(labels: Mapping[str, str], annotations: Mapping[str, str]) -> Cause | None:
    """Return why the agent must release the driver, or None if it need not release it.

    While the GPU Operator upgrades the driver or changes MIG, it sets its label to a value that
    starts with "paused" to stop the users of the driver.
    """
    deploy = labels.get(_OPERATOR_LABEL, "true")
    if deploy.startswith("paused"):
        return Cause(f"label {_OPERATOR_LABEL} is {deploy}", "gpu_operator")
    with contextlib.suppress(BadAnnotation):  # The webhook warns about other values.
        if parse_maintenance(annotations.get(MAINTENANCE, "false")):
            return Cause(f"annotation {MAINTENANCE} is true", "maintenance")
    return None


def of_pool(annotations: Mapping[str, str]) -> PoolReading | None:
    """Return the pool of a GPU with unified memory, or None if the node has no such annotation."""
    text = annotations.get(UNIFIED_MEMORY)
    if text is None:
        return None
    try:
        return PoolReading(LABELS, parse_unified_memory(text))
    except BadAnnotation as err:
        return PoolReading(LABELS, error=str(err))


def of_k3s(annotations: Mapping[str, str]) -> TopologyReading | None:
    """Return the topology policy that the arguments of k3s set.

    Return None if this is not a k3s node, or if an argument names a file that may set the policy.
    If no argument sets the policy, return the kubelet's default with a source of lower priority,
    because files of the kubelet may set another policy.
    """
    try:
        arguments = msgspec.json.decode(annotations.get(_K3S_ARGUMENTS, ""), type=list[str])
    except (ValueError, RecursionError):  # msgspec raises UnicodeDecodeError too
        return None
    of_kubelet = [
        text.removeprefix("--kubelet-arg=").partition("=")
        for before, text in pairwise(["", *arguments])
        if before == "--kubelet-arg" or text.startswith("--kubelet-arg=")
    ]
    policies = [value for name, _, value in of_kubelet if name == "topology-manager-policy"]
    if not policies and any(name in ("config", "config-dir") for name, _, _ in of_kubelet):
        return None
    policy = policies[-1] if policies else "none"
    source = K3S if policies else f"{K3S}-default"
    return TopologyReading(source, policy) if policy in TOPOLOGY_POLICIES else None


def of_labels(labels: Mapping[str, str]) -> PluginReading | None:
    """Return the plugin's configuration from the labels of GFD or GKE, or None if the node has
    none.

    On a node with several GPU models the labels describe a random model, so they have the lowest
    priority.
    """
    strategy = labels.get("nvidia.com/gpu.sharing-strategy")
    count = labels.get("nvidia.com/gpu.replicas", "")
    renamed = not labels.get("nvidia.com/gpu.product", "").endswith("-SHARED")
    gke = labels.get("cloud.google.com/gke-gpu-sharing-strategy")
    if strategy is None and gke is not None:
        strategy = gke
        count = labels.get("cloud.google.com/gke-max-shared-clients-per-gpu", "")
        renamed = False
    sharing = _SHARING.get(strategy or "")
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
