"""Tests the doctor's findings about missing sources of an agent, versions and clocks."""

import re
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from headroom.contract.gpunode import GPUNodeStatus, Plugin, Replicas, Source
from headroom.contract.kube import Node, NodeStatus, ObjectMeta
from headroom.contract.watched import GPUNodeSeen, NodeSeen
from headroom.doctor.findings import Finding, Weight
from headroom.doctor.node_rules import examine
from headroom.doctor.source_rules import source_findings
from tests.builders import GPU, NOW_S, STAMP, device, gpunode
from tests.controlplane import ROOT
from tests.state.states import state_of

DRIVERLESS = ("nvml", "absent", "driver does not answer: Unknown Error (NVML 999)")
BLIND = (
    "proc",
    "degraded",
    "processes of other containers cannot be seen: the agent needs hostPID: true",
    "no_host_pid",
)
HIDDEN = ("proc", "degraded", "no permission to read processes in /proc")
NO_FILE = ("checkpoint", "absent", "no file; it is mounted from /var/lib/kubelet/device-plugins")
NO_SOCKET = ("podresources", "absent", "no socket; it is mounted from /var/lib/kubelet/...")
NO_PLUGIN = ("plugin", "absent", "no device plugin listens on its socket", "no_device_plugin")
NO_TRACE = (
    "plugin",
    "degraded",
    "environment of the device plugin cannot be read: CAP_SYS_PTRACE is missing",
    "no_ptrace",
)
NO_LABELS = ("labels", "absent", "403 Forbidden")
NO_KUBELET = ("kubelet", "absent", "no kubelet listens on its socket", "no_kubelet")
HIDDEN_KUBELET = (
    "kubelet",
    "degraded",
    "kubelet is not in the agent's PID namespace: the agent needs hostPID: true",
    "no_host_pid",
)
K3S = (
    "kubelet",
    "absent",
    "k3s hides the kubelet's flags, and its files set no topology manager policy",
    "k3s",
)
NO_MIG = (
    "nvml",
    "degraded",
    "GPU-a: MIG is on and no instance can be read: the agent's container has no permission",
    "mig",
)
RELEASED = (
    "nvml",
    "absent",
    "driver is released: annotation headroom.gpu/maintenance is true",
    "maintenance",
)
PAUSED = (
    "nvml",
    "absent",
    "driver is released: label nvidia.com/gpu.deploy.device-plugin is paused-for-mig-change",
    "gpu_operator",
)
NO_CGROUPS = (
    "nvml",
    "degraded",
    "cannot check the agent's own cgroup for a GPU memory limit",
    "no_cgroups",
)
NO_EXPORTER = ("dcgm", "absent", "answered 503")

KNOWN = Plugin(
    allocation_policy="distributed",
    device_list_strategy="envvar",
    topology_manager_policy="none",
    source="plugin",
)


def status(*sources: tuple[str, ...], plugin: Plugin | None = None) -> GPUNodeStatus:
    """Return a report. Each source has a name, a state, a message and codes."""
    rows = [
        Source(name=name, state=state, message=message, codes=[*codes])  # type: ignore[arg-type]
        for name, state, message, *codes in sources
    ]
    return GPUNodeStatus(sources=rows, plugin=plugin or Plugin())


@pytest.mark.parametrize(
    ("source", "weight", "mends"),
    [
        pytest.param(DRIVERLESS, Weight.WARNING, "nvidia-smi", id="no driver"),
        pytest.param(BLIND, Weight.WARNING, "hostPID: true", id="no hostPID"),
        pytest.param(HIDDEN, Weight.WARNING, "SYS_PTRACE", id="hidden processes"),
        pytest.param(NO_FILE, Weight.ADVICE, "/var/lib/kubelet/device-plugins", id="checkpoint"),
        pytest.param(NO_SOCKET, Weight.ADVICE, "/var/lib/kubelet/pod-resources", id="socket"),
        pytest.param(NO_PLUGIN, Weight.ADVICE, "plugin's pod runs on the node", id="no plugin"),
        pytest.param(NO_TRACE, Weight.ADVICE, "SYS_PTRACE", id="environment of the plugin"),
        pytest.param(NO_LABELS, Weight.ADVICE, "get its node", id="no permission to read its node"),
        pytest.param(NO_KUBELET, Weight.ADVICE, "kubelet runs", id="no kubelet"),
        pytest.param(HIDDEN_KUBELET, Weight.ADVICE, "hostPID: true", id="hidden kubelet"),
        pytest.param(K3S, Weight.ADVICE, "kubelet.conf.d", id="k3s"),
        pytest.param(NO_MIG, Weight.WARNING, "components/mig", id="unreadable MIG"),
        pytest.param(RELEASED, Weight.WARNING, "maintenance-", id="maintenance"),
        pytest.param(PAUSED, Weight.WARNING, "GPU Operator", id="paused by the operator"),
        pytest.param(NO_CGROUPS, Weight.WARNING, "mount the host's /sys", id="no cgroups"),
        pytest.param(NO_EXPORTER, Weight.ADVICE, "dcgm-exporter's pod", id="no exporter"),
    ],
)
def test_each_failed_source_has_its_fix(
    source: tuple[str, ...], weight: Weight, mends: str
) -> None:
    ((weighs, found, do),) = source_findings(status(source))
    assert weighs is weight
    assert f"source {source[0]} is {source[1]} ({source[2]})" in found
    assert mends in do


def test_two_missing_sources_of_holdings_give_one_finding() -> None:
    ((weighs, found, do),) = source_findings(status(NO_FILE, NO_SOCKET))
    assert weighs is Weight.WARNING
    assert "neither the kubelet's checkpoint nor its PodResources" in found
    assert "/var/lib/kubelet/device-plugins" in do
    assert "/var/lib/kubelet/pod-resources" in do


def test_data_missing_only_from_the_checkpoint_has_its_own_fix() -> None:
    """PodResources can be read, so replicas are counted, but their pods are unknown."""
    nameless = "lists pods without their uids, and there is no checkpoint to look them up"
    sources = status(NO_FILE, ("podresources", "degraded", nameless, "no_checkpoint")).sources
    reported = GPUNodeStatus(devices=[device("a", replicas=Replicas(free=1))], sources=sources)
    file, socket = source_findings(reported)
    assert "source checkpoint is absent" in file[1]
    assert "source podresources is degraded" in socket[1]
    assert file[2] == socket[2]


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(NO_KUBELET, id="the kubelet's configuration has the policy"),
        pytest.param(NO_PLUGIN, id="other sources have strategy and policy"),
        pytest.param(NO_LABELS, id="the plugin itself has them"),
        pytest.param(("gpm", "absent", "not supported"), id="older GPUs have none"),
        pytest.param(
            ("limits", "absent", "this driver has no memory limits"), id="older drivers have none"
        ),
        pytest.param(("proc", "ok", ""), id="nothing is missing"),
    ],
)
def test_data_that_another_source_provides_is_not_reported_as_missing(
    source: tuple[str, ...],
) -> None:
    assert list(source_findings(status(source, plugin=KNOWN))) == []


def test_gkes_plugin_is_not_reported_as_missing_if_labels_describe_its_sharing() -> None:
    why = "it is GKE's own plugin; the labels of the node show how it shares"
    source = ("plugin", "absent", why, "gke_plugin")
    assert list(source_findings(status(source, plugin=Plugin(source="labels")))) == []
    assert list(source_findings(status(source, plugin=Plugin())))


def test_every_documented_fault_of_the_agent_has_a_fix() -> None:
    """The agent's tests compare the agent with the sources in docs/design/agent.md."""
    rows = (ROOT / "docs/design/agent.md").read_text().splitlines()
    cells = [cell for row in rows if row.startswith("| ") for cell in re.split(r"<br>|\|", row)]
    fault = re.compile(
        r"source (?P<name>[a-z-]+) (?P<state>absent|degraded)"
        r"(?: \((?P<code>[a-z_]+)\))?: (?P<why>.+)"
    )
    shown = [
        (found["name"], found["state"], found["why"], *filter(None, [found["code"]]))
        for cell in cells
        if (found := fault.match(cell.strip()))
    ]
    assert len(shown) > 20
    for source in shown:
        ((_, found, do),) = source_findings(status(source))
        assert f"({source[2]})" in found
        assert do


def findings(
    reported: GPUNodeStatus, version: str = "1.0", name: str = "n", now_s: float = NOW_S
) -> list[Finding]:
    node = Node(metadata=ObjectMeta(name=name), status=NodeStatus(allocatable={GPU: "1"}))
    whole = msgspec.structs.replace(gpunode(device("a"), name=name), status=reported)
    return examine(state_of(NodeSeen(node), GPUNodeSeen(whole, NOW_S)).cluster, now_s, version)


def whole(**how: object) -> GPUNodeStatus:
    reported = gpunode(device("a"), plugin=KNOWN).status
    assert reported is not None
    return msgspec.structs.replace(reported, **how)


def test_missing_data_of_a_report_is_reported_for_its_node() -> None:
    assert findings(whole()) == []
    (one,) = findings(whole(sources=status(BLIND).sources))
    assert (one.weight, one.nodes) == (Weight.WARNING, ("n",))


def test_an_agent_of_another_version_is_reported() -> None:
    (one,) = findings(whole(agent_version="0.9"), "1.0")
    assert one.weight is Weight.ADVICE
    assert one.found == "the agent has version 0.9, and this doctor has version 1.0"
    assert findings(whole(agent_version="1.0"), "1.0") == []
    assert findings(whole(agent_version="0.9"), "") == []


@pytest.mark.parametrize(
    ("ahead_s", "says"),
    [(4, None), (25, "about 20 s"), (250, "about 4 min"), (10_000, "about 3 h")],
)
def test_a_report_from_the_future_is_a_clock_finding(ahead_s: int, says: str | None) -> None:
    """A report is not called stale even if its time is further ahead than the age limit."""
    stamp = (datetime.fromisoformat(STAMP) + timedelta(seconds=ahead_s)).astimezone(UTC)
    found = findings(whole(observed_at=stamp.isoformat()))
    assert [one.weight for one in found] == ([Weight.ADVICE] if says else [])
    assert not says or f"ahead of this machine's by {says}" in found[0].found


def test_a_report_from_the_past_is_stale_whatever_its_clock() -> None:
    (one,) = findings(whole(), now_s=NOW_S + 1000)
    assert "stale" in one.found
