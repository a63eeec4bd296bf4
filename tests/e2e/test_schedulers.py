"""Tests the two shipped ways to run kube-scheduler with Headroom: its own scheduler with two
replicas, and the cluster's default scheduler over TLS. Also tests which pods a dead or hanging
extender affects.
"""

import json
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from extender.event_recorder import COMPONENT
from headroom.certs.cluster_secrets import wanted
from headroom.certs.commands import copy
from headroom.certs.pki import Pair, Terms, Wanted, next_authority, next_leaf, usable
from headroom.contract.gpunode import ADOPTED
from headroom.doctor.scheduler_flags import BACKOFF_FLAG
from headroom.runtime.server.tls import TlsFiles
from tests.controlplane import ROOT, ControlPlane, built, scheduler_configuration
from tests.deploy.rendered import IMAGE_VALUES, NAMESPACE, objects, template
from tests.e2e.cluster import EVENTS, RBAC, Cluster
from tests.e2e.conftest import NewCluster, Tell
from tests.e2e.nodes import GIB, SYSTEM_NAMESPACE, Shape
from tests.kubernetes_version import SCHEDULERS
from tests.loopback import LOOPBACK
from tests.processes import free_ports
from tests.tunnel import Tunnel
from tests.waiting import PATIENCE_S

DEFAULT = "default-scheduler"
TERMS = Terms()
MANY_REPLICAS = Shape(replicas=16)
SCHEDULER_TOKEN = "scheduler-of-the-tests"


class Mounted:
    """The certificate files of the server and its client. ``headroom certs`` creates them, and the
    test copies them as the kubelet would mount them.
    """

    def __init__(self, folder: Path) -> None:
        extender, *_, client = wanted(SYSTEM_NAMESPACE)
        self.wanted = extender, client
        self._authorities: dict[str, Pair] = {}
        self._folders = {each.secret: folder / each.secret for each in self.wanted}
        self._secret, self.host = folder / "secret", folder / "host"
        for each in (*self._folders.values(), self._secret, self.host):
            each.mkdir()
        for each in self.wanted:
            self.run(each)

    def run(self, each: Wanted, replace: bool = False, now: datetime | None = None) -> None:
        """Run headroom certs once for the server or the client. If ``replace`` is true, delete the
        authority first.
        """
        now = now or datetime.now(UTC)
        folder = self._folders[each.secret]
        held = None if replace else self._authorities.get(each.purpose)
        cert, key, ca = (folder / name for name in ("tls.crt", "tls.key", "ca.crt"))
        found = usable(cert.read_bytes(), key.read_bytes()) if cert.exists() else None
        after = next_authority(held, each.purpose, now, TERMS)
        leaf, _ = next_leaf(found, after, each, now, TERMS)
        self._authorities[each.purpose] = after
        for path, content in ((cert, leaf.cert), (key, leaf.key), (ca, after.cert)):
            path.write_bytes(content)
        serving, client = (self._folders[each.secret] for each in self.wanted)
        for source, name in ((client, "tls.crt"), (client, "tls.key"), (serving, "ca.crt")):
            if (source / name).exists():
                (self._secret / name).write_bytes((source / name).read_bytes())
        copy(self._secret, self.host)

    @property
    def tls(self) -> TlsFiles:
        """Return the TLS settings of the extender."""
        serving, client = (self._folders[each.secret] for each in self.wanted)
        return TlsFiles(serving / "tls.crt", serving / "tls.key", client / "ca.crt")


@pytest.fixture
def mounted(tmp_path: Path) -> Mounted:
    return Mounted(tmp_path)


def default_scheduler(plane: ControlPlane, port: int, host: Path) -> dict[str, Any]:
    """Return the configuration in deploy/default-scheduler for an extender on this port."""
    file = ROOT / "deploy/default-scheduler/kube-scheduler.yaml"
    content: dict[str, Any] = yaml.safe_load(file.read_text())
    kubeconfig = str(plane.kubeconfig("scheduler-of-the-tests"))
    content |= {"clientConnection": {"kubeconfig": kubeconfig}}
    content["leaderElection"] = {"leaderElect": False}
    for extender in content["extenders"]:
        extender["urlPrefix"] = f"https://127.0.0.1:{port}"
        extender["tlsConfig"] = {
            key: value.replace("/etc/kubernetes/headroom", str(host))
            for key, value in extender["tlsConfig"].items()
        }
    return content


@pytest.fixture
def tunnel() -> Iterator[Tunnel]:
    (port,) = free_ports(1)
    between = Tunnel(port)
    between.open()
    yield between
    between.close()


def bound(cluster: Cluster, name: str, vram: str | None = "1Gi", **spec: Any) -> float:
    """Create a pod for the default scheduler. Return the seconds until it was bound."""
    began_s = time.monotonic()
    cluster.create_pod(name, vram, gpus=1 if vram else 0, schedulerName=DEFAULT, **spec)
    cluster.until(lambda: bool(cluster.node_of(name)), f"{name} is bound")
    return time.monotonic() - began_s


def test_the_default_scheduler_of_each_minor_uses_tls_and_survives_renewals(
    new_cluster: NewCluster, mounted: Mounted, tunnel: Tunnel, tell: Tell
) -> None:
    cluster = new_cluster(1, MANY_REPLICAS)
    cluster.start_extender(port=tunnel.to_port, tls=mounted.tls)
    cluster.settle()
    content = default_scheduler(cluster.plane, tunnel.port, mounted.host)
    for scheduler in SCHEDULERS:
        cluster.start_scheduler_as(scheduler, content, binary=scheduler)
        bound(cluster, f"gpu-{scheduler}")
        annotations = cluster.pod(f"gpu-{scheduler}")["metadata"]["annotations"]
        assert "headroom.gpu/placement" in annotations
        bound(cluster, f"plain-{scheduler}", None)
        if scheduler != SCHEDULERS[-1]:
            cluster.kill(scheduler)
    counted = 'headroom_binds_total{outcome="bound"}'
    cluster.until(lambda: cluster.metric(counted) == len(SCHEDULERS), "the binds are counted")

    def cut_and_bind(name: str) -> None:
        tunnel.cut()  # An open connection presents no certificate again.
        bound(cluster, name)

    serving, client = mounted.wanted
    first = cluster.plane.log("extender").count("tls_renewed")
    due = datetime.now(UTC) + TERMS.leaf_lifetime - TERMS.leaf_renewed_before
    for each in (serving, client):
        mounted.run(each, now=due - timedelta(days=59))  # Nothing is due.
    # The client's authority can be replaced at any time, because both sides reload its files.
    mounted.run(client, replace=True)
    cut_and_bind("client-replaced")
    # kube-scheduler must restart, because it reads the authority that it trusts only at its start.
    mounted.run(serving, replace=True)
    tunnel.cut()
    cluster.create_pod("waits", "1Gi", schedulerName=DEFAULT)
    says = "certificate signed by unknown authority"
    cluster.until(lambda: says in cluster.rejection("waits"), "the authority is not read again")
    bound(cluster, "plain", None)
    cluster.kill(SCHEDULERS[-1])
    cluster.start_scheduler_as("again", content)
    cluster.until(lambda: bool(cluster.node_of("waits")), "a restarted one has it")
    assert cluster.plane.log("extender").count("tls_renewed") > first

    # A hanging extender delays other pods by at most the timeout of the second entry. A dead
    # extender does not delay them.
    cluster.plane.pause("extender")
    try:
        hung_s = bound(cluster, "plain-while-it-hangs", None)
        tell(f"default scheduler, extender hangs: a pod without a GPU is bound in {hung_s:.2f} s")
    finally:
        cluster.plane.resume("extender")
    cluster.kill("extender")
    cluster.create_pod("gpu-while-it-is-dead", "1Gi", schedulerName=DEFAULT)
    bound(cluster, "plain-while-it-is-dead", None)
    cluster.until(
        lambda: "Post" in cluster.rejection("gpu-while-it-is-dead"), "it shows why it waits"
    )
    cluster.delete_by_force("gpu-while-it-is-dead")


def test_a_scheduler_that_lacks_the_feature_gate_starts_without_it(
    new_cluster: NewCluster, tmp_path: Path
) -> None:
    """The chart also starts a kube-scheduler of an unknown newer version without the gate."""
    binary = built("kube-scheduler")["kube-scheduler"]
    renamed = tmp_path / "kube-scheduler"
    gate = b"SchedulerPopFromBackoffQ"
    renamed.write_bytes(binary.read_bytes().replace(gate, gate[:-1] + b"X"))
    renamed.chmod(0o755)
    with_flag = subprocess.run(
        [renamed, BACKOFF_FLAG], capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert with_flag.returncode != 0
    assert f"unrecognized feature gate: {gate.decode()}" in with_flag.stderr
    image = {"repository": "registry.example/kube-scheduler", "tag": "v1.39.0"}
    values = {"images": {**IMAGE_VALUES, "kubeScheduler": image}}
    deployment = objects(template(tmp_path, values))["Deployment", NAMESPACE, "headroom-scheduler"]
    (command,) = (
        each["command"]
        for each in deployment["spec"]["template"]["spec"]["containers"]
        if each["name"] == "kube-scheduler"
    )
    flags = [flag for flag in command[1:] if not flag.startswith("--config=")]
    cluster = new_cluster(1)
    plane = cluster.plane
    file = plane.folder / "renamed.json"
    url = cluster.start_extender()
    file.write_text(json.dumps(scheduler_configuration(url, plane.kubeconfig(SCHEDULER_TOKEN))))
    plane.spawn("renamed", str(renamed), f"--config={file}", "--secure-port=0", *flags)
    try:
        cluster.settle()
        cluster.create_pod("gpu", "1Gi")
        cluster.until(lambda: bool(cluster.node_of("gpu")), "the pod is bound")
    finally:
        plane.kill("renamed")


def own_scheduler(plane: ControlPlane, port: int) -> dict[str, Any]:
    """Return the configuration in deploy/base for an extender on this port, with fast leader
    election.
    """
    content: dict[str, Any] = yaml.safe_load((ROOT / "deploy/base/kube-scheduler.yaml").read_text())
    kubeconfig = str(plane.kubeconfig("scheduler-of-the-tests"))
    content["clientConnection"] = {"kubeconfig": kubeconfig}
    sooner = {"leaseDuration": "3s", "renewDeadline": "2s", "retryPeriod": "500ms"}
    content["leaderElection"] |= sooner
    for extender in content["extenders"]:
        extender["urlPrefix"] = f"http://127.0.0.1:{port}"
        del extender["enableHTTPS"], extender["tlsConfig"]
    return content


@pytest.fixture
def elects(plane: ControlPlane) -> Iterator[None]:
    """Grant the test's schedulers the permission to elect a leader."""
    leases = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["*"]}
    role = {"metadata": {"name": "elects"}, "rules": [leases]}
    user = {
        "kind": "User",
        "name": "system:kube-scheduler",
        "apiGroup": "rbac.authorization.k8s.io",
    }
    ref = {"kind": "Role", "name": "elects", "apiGroup": "rbac.authorization.k8s.io"}
    where = f"{RBAC}/namespaces/{SYSTEM_NAMESPACE}"
    plane.call("POST", f"{where}/roles", role)
    binding = {"metadata": {"name": "elects"}, "roleRef": ref, "subjects": [user]}
    plane.call("POST", f"{where}/rolebindings", binding)
    yield
    for kind in ("rolebindings", "roles"):
        plane.call("DELETE", f"{where}/{kind}/elects")


@pytest.mark.usefixtures("elects")
def test_the_second_replica_takes_over_without_effect_on_pods(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(2)
    plane = cluster.plane
    ports = cluster.start_replicas("extender-a", "extender-b")
    for replica, port in zip("ab", ports, strict=True):
        cluster.start_scheduler_as(f"scheduler-{replica}", own_scheduler(plane, port))
    # Start the cluster's own scheduler without Headroom in its configuration.
    kubeconfig = str(plane.kubeconfig("scheduler-of-the-tests"))
    stock = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "clientConnection": {"kubeconfig": kubeconfig},
        "leaderElection": {"leaderElect": False},
    }
    cluster.start_scheduler_as("scheduler-of-the-cluster", stock)
    cluster.settle()
    cluster.create_pod("first", "20Gi")
    cluster.until(lambda: bool(cluster.node_of("first")), "the first is bound")

    def leads(replica: str) -> bool:
        return "uccessfully acquired lease" in plane.log(f"scheduler-{replica}")

    (leader,) = [replica for replica in "ab" if leads(replica)]
    other = "ab".replace(leader, "")
    cluster.kill(f"scheduler-{leader}")
    cluster.kill(f"extender-{leader}")
    cluster.create_pod("second", "20Gi")
    cluster.until(lambda: bool(cluster.node_of("second")), "the other replica goes on")
    assert cluster.node_of("first") != cluster.node_of("second")
    assert leads(other)
    cluster.create_pod("third", "20Gi")
    cluster.until(
        lambda: "insufficient GPU memory" in cluster.rejection("third"), "it does not fit"
    )
    cluster.kill(f"extender-{other}")
    bound(cluster, "plain-elsewhere", None)
    cluster.create_pod("fourth", "1Gi")
    cluster.until(
        lambda: "connection refused" in cluster.rejection("fourth"), "it shows why it waits"
    )
    assert not cluster.node_of("fourth")


def test_mode_observe_overcommits_like_stock_and_enforce_needs_no_restart(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(1)
    cluster.bring_up()
    cluster.create_pod("first", "20Gi")
    cluster.until(lambda: bool(cluster.node_of("first")), "the first is bound")
    cluster.create_pod("second", "20Gi")

    def shown() -> list[tuple[str, str]]:
        return [
            (event["reason"], event["involvedObject"]["name"])
            for event in cluster.plane.call("GET", EVENTS)["items"]
            if (event.get("source") or {}).get("component") == COMPONENT
        ]

    cluster.until(lambda: shown() == [("NoGPUFits", "second")], "the second pod has an Event")
    cluster.kill_all()
    verbs = cluster.start_extender(settings={"mode": "observe"})
    # Wait, because an observing extender lets pods pass without counting them until it has listed
    # the cluster.
    cluster.until(cluster.is_ready, "the extender is ready")
    cluster.start_scheduler(verbs)
    cluster.until(lambda: bool(cluster.node_of("second")), "the second is bound")
    second = cluster.pod("second")
    # The reservations exceed the device's memory.
    reservations = cluster.gpunode(cluster.node_of("second")).spec.reservations
    assert reservations[second["metadata"]["uid"]].flags == [ADOPTED]
    committed = [next(iter(p.charges[0].candidates.values())) for p in reservations.values()]
    assert sum(committed) > 24 * GIB
    would = 'headroom_would_reject_total{reason="memory_on_any",verb="%s"}'
    # Wait, because the metric is updated after the response is sent.
    cluster.until(lambda: cluster.metric(would % "filter") >= 1, "filter would have rejected")
    cluster.until(lambda: cluster.metric(would % "bind") >= 1, "bind would have rejected")
    assert cluster.metric("headroom_observe_only") == 1
    decision = second["metadata"]["uid"]
    message = LOOPBACK.get(f"{cluster.debug_url()}/v1/decisions?uid={decision}")
    assert message.headers["Headroom-Mode"] == "observe"
    # There are two decisions if kube-scheduler changed the pod between the calls. The newest
    # decision is first.
    parts = {
        verb: next(each[verb] for each in message.json()["decisions"] if each[verb])
        for verb in ("filter", "bind")
    }
    assert (parts["filter"]["fits"], parts["filter"]["observed_only"]) == (0, True)
    assert (parts["bind"]["outcome"], parts["bind"]["reason"]) == ("bound", "memory_on_any")
    # The Event is older, because no Events are written in observe mode.
    assert shown() == [("NoGPUFits", "second")]

    cluster.change_settings("extender", {"mode": "enforce"})
    cluster.until(lambda: cluster.metric("headroom_observe_only") == 0, "it enforces")
    cluster.create_pod("third", "20Gi")
    cluster.until(
        lambda: "insufficient GPU memory" in cluster.rejection("third"), "it does not fit"
    )
    # A rejected pod is retried immediately when the rejection no longer applies.
    cluster.change_settings("extender", {"mode": "observe"})
    cluster.until(lambda: bool(cluster.node_of("third")), "the third is let go")
