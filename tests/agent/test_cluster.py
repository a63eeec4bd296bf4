"""The agent at a real API server: what it may write there, and what it makes of its bad days."""

import contextlib
import logging
import math
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
import urllib3
import yaml
from kubernetes.client import ApiClient
from structlog.testing import capture_logs

from agent.api_server import of_client
from agent.kube_publisher import Held, KubernetesPublisher, NotDelivered
from agent.probes.gpunode_watch import GPUNodeWatch
from agent.status_writer import StatusWriter
from contract.gpunode import (
    API_VERSION,
    KIND,
    Device,
    GPUNodeSpec,
    GPUNodeStatus,
    PodUse,
    Reservation,
    SmActivity,
)
from contract.gpunode_json import decode_gpunode
from contract.heartbeat import Confirmation, confirmation_of
from contract.kube import Lease
from extender.errors import StoreConflict
from extender.kube.client import KubeApi
from tests.blocking import Blocking, Loop
from tests.controlplane import ADMIN_TOKEN, ROOT, ApiRefused, ControlPlane
from tests.waiting import until

#: The figures are shown with ``--log-cli-level=info``.
log = logging.getLogger(__name__)

SYSTEM = "headroom-system"
AGENT = "headroom-agent"
NODES = ("agent-a", "agent-b")
GPUNODES = "/apis/headroom.gpu/v1alpha1/gpunodes"
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
ADMISSION = "/apis/admissionregistration.k8s.io/v1"
ACCOUNTS = f"/api/v1/namespaces/{SYSTEM}/serviceaccounts"
AT_ONCE = {"gracePeriodSeconds": 0}
HOUR_S = 3600.0


def unless(status: int, plane: ControlPlane, method: str, path: str, body: Any) -> None:
    try:
        plane.call(method, path, body)
    except ApiRefused as err:
        if f": {status} " not in str(err):
            raise


def manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "deploy/base" / name).read_text()))


@pytest.fixture(scope="module")
def installed(plane: ControlPlane) -> Iterator[ControlPlane]:
    """The agent's service account with its roles, the admission policy, two nodes with a GPUNode
    each and a pod of the agent."""
    account = {"kind": "ServiceAccount", "name": AGENT, "namespace": SYSTEM}
    undo = contextlib.ExitStack()

    def create(path: str, body: dict[str, Any]) -> None:
        unless(409, plane, "POST", path, body)
        name = body["metadata"]["name"]
        undo.callback(unless, 404, plane, "DELETE", f"{path}/{name}", AT_ONCE)

    with undo:
        unless(409, plane, "POST", "/api/v1/namespaces", {"metadata": {"name": SYSTEM}})
        create(ACCOUNTS, {"metadata": {"name": AGENT}})
        for role in manifests("rbac.yaml"):
            namespace = role["metadata"].get("namespace")
            where = f"{RBAC}/namespaces/{namespace}" if namespace else RBAC
            create(f"{where}/{role['kind'].lower()}s", role)
            if role["metadata"]["name"] == AGENT:
                reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": role["kind"]}
                binding = {
                    "metadata": {"name": "agents-of-the-tests"},
                    "roleRef": {**reference, "name": AGENT},
                    "subjects": [account],
                }
                create(f"{where}/{role['kind'].lower()}bindings", binding)
        for node in NODES:
            create("/api/v1/nodes", {"metadata": {"name": node}})
            kind = {"apiVersion": API_VERSION, "kind": KIND}
            create(GPUNODES, {**kind, "metadata": {"name": node}, "spec": {}})
            spec = {
                "nodeName": node,
                "serviceAccountName": AGENT,
                "containers": [{"name": "agent", "image": "none"}],
            }
            pod = {"metadata": {"name": f"pod-on-{node}"}, "spec": spec}
            create(f"/api/v1/namespaces/{SYSTEM}/pods", pod)
            undo.callback(unless, 404, plane, "DELETE", f"{LEASES}/{node}", AT_ONCE)
        policy, binding = (
            each
            for each in manifests("admission.yaml")
            if each["metadata"]["name"] == "headroom-agent-own-node"
        )
        create(f"{ADMISSION}/validatingadmissionpolicies", policy)
        create(f"{ADMISSION}/validatingadmissionpolicybindings", binding)
        until(lambda: not may_write(plane, "agent-a", "agent-b"), "the policy is in force")
        yield plane


def token(plane: ControlPlane, node: str | None) -> str:
    """The token that the node's kubelet would mount into its agent; None: a token of no pod."""
    bound: dict[str, Any] = {}
    if node is not None:
        name = f"pod-on-{node}"
        pod = plane.call("GET", f"/api/v1/namespaces/{SYSTEM}/pods/{name}")
        reference = {"apiVersion": "v1", "kind": "Pod", "name": name}
        bound = {"boundObjectRef": {**reference, "uid": pod["metadata"]["uid"]}}
    request = {"spec": {"expirationSeconds": 3600, **bound}}
    answer = plane.call("POST", f"{ACCOUNTS}/{AGENT}/token", request)
    given: str = answer["status"]["token"]
    return given


@contextlib.contextmanager
def publishing(
    plane: ControlPlane, sits_on: str | None, says: str, timeout_s: float = 5.0
) -> Iterator[KubernetesPublisher]:
    """The publisher of an agent on one node that is configured for another one."""
    configuration = plane.configuration(token(plane, sits_on))
    configuration.no_proxy = "*"
    with ApiClient(configuration) as kube:
        yield KubernetesPublisher(
            of_client(kube), says, SYSTEM, heartbeat_s=30, timeout_s=timeout_s
        )
        kube.rest_client.pool_manager.clear()


def may_write(plane: ControlPlane, sits_on: str, says: str) -> bool:
    with publishing(plane, sits_on, says) as publisher:
        try:
            publisher.report(status())
        except NotDelivered:
            return False
    return True


def status(
    used_bytes: int = 5, observed_at: str = "2026-11-21T00:00:00.000000Z", sm_ratio: float = 0.0
) -> GPUNodeStatus:
    device = Device(
        uuid="GPU-a",
        memory_bytes=1 << 36,
        reserved_bytes=0,
        used_bytes=used_bytes,
        sm_activity=SmActivity(ratio=sm_ratio, source="test"),
    )
    return GPUNodeStatus(devices=[device], observed_at=observed_at)


def vouch(observed_at: str = "then") -> Confirmation:
    return Confirmation(sampled_at="now", gpunode="uid", observed_at=observed_at)


def reported(plane: ControlPlane, node: str) -> GPUNodeStatus:
    held = decode_gpunode(msgspec.json.encode(plane.call("GET", f"{GPUNODES}/{node}"))).status
    assert held is not None
    return held


def lease(plane: ControlPlane, node: str) -> Lease:
    return msgspec.convert(plane.call("GET", f"{LEASES}/{node}"), Lease)


NOW = datetime(2026, 11, 21, tzinfo=UTC)


class TestOwnNodeOnly:
    def test_an_agent_writes_what_is_of_its_node(self, installed: ControlPlane) -> None:
        for node in NODES:
            with publishing(installed, node, node) as publisher:
                publisher.report(status(used_bytes=7))
                first = publisher.heartbeat(NOW, vouch())  # created
                second = publisher.heartbeat(NOW, vouch("later"))  # renewed
            assert reported(installed, node).devices[0].used_bytes == 7
            assert first != second == lease(installed, node).metadata.resource_version
            assert confirmation_of(lease(installed, node)) == vouch("later")

    @pytest.mark.parametrize(
        ("sits_on", "message"),
        [
            pytest.param(
                "agent-b",
                "an agent on node agent-b may write only what is named agent-b, not agent-a",
                id="another node's",
            ),
            pytest.param(None, "the agent's token names no node", id="one that names no node"),
        ],
    )
    def test_no_other_token_writes_it(
        self, installed: ControlPlane, sits_on: str | None, message: str
    ) -> None:
        unless(404, installed, "DELETE", f"{LEASES}/agent-a", AT_ONCE)
        before = installed.call("GET", f"{GPUNODES}/agent-a")
        with publishing(installed, sits_on, "agent-a") as publisher:
            rejected = "status of GPUNode agent-a was rejected with 403: .*" + message
            with pytest.raises(NotDelivered, match=f"{rejected}.*spec.nodeName of its pod"):
                publisher.report(status(used_bytes=9))
            rejected = f"Lease {SYSTEM}/agent-a was rejected with 403: .*{message}"
            with pytest.raises(NotDelivered, match=rejected):
                publisher.heartbeat(NOW, vouch())  # would create it
            with publishing(installed, "agent-a", "agent-a") as owner:
                version = owner.heartbeat(NOW, vouch())
            with pytest.raises(NotDelivered, match=rejected):
                publisher.heartbeat(NOW, vouch("forged"))
        assert installed.call("GET", f"{GPUNODES}/agent-a") == before
        assert lease(installed, "agent-a").metadata.resource_version == version

    def test_nor_does_it_touch_other_leases(self, installed: ControlPlane) -> None:
        """A scheduler of ours elects its leader in the same namespace."""
        with (
            publishing(installed, "agent-a", "leader-of-the-schedulers") as publisher,
            pytest.raises(NotDelivered, match="not leader-of-the-schedulers"),
        ):
            publisher.heartbeat(NOW, vouch())

    def test_its_role_is_what_it_needs_and_no_more(self, installed: ControlPlane) -> None:
        """As the API server itself sums it up, less what every authenticated user may."""
        body = {"spec": {"namespace": SYSTEM}}
        path = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
        answer = request(installed, token(installed, "agent-a"), "POST", path, body)
        rules = {
            (group, resource, verb)
            for rule in answer["status"]["resourceRules"]
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
            if group not in ("authorization.k8s.io", "authentication.k8s.io", "certificates.k8s.io")
        }
        assert rules == {
            ("", "nodes", "get"),
            ("headroom.gpu", "gpunodes", "get"),
            ("headroom.gpu", "gpunodes", "watch"),
            ("headroom.gpu", "gpunodes/status", "patch"),
            ("coordination.k8s.io", "leases", "create"),
            ("coordination.k8s.io", "leases", "patch"),
        }

    def test_agents_cannot_write_reservations(self, installed: ControlPlane) -> None:
        before = installed.call("GET", f"{GPUNODES}/agent-a")["spec"]
        forged = {"status": msgspec.to_builtins(status()), "spec": {"initialised": True}}
        own = token(installed, "agent-a")
        request(installed, own, "PATCH", f"{GPUNODES}/agent-a/status", forged)
        assert installed.call("GET", f"{GPUNODES}/agent-a")["spec"] == before
        with pytest.raises(ApiRefused, match="403"):
            request(installed, own, "PATCH", f"{GPUNODES}/agent-a", forged)


def request(plane: ControlPlane, token: str, method: str, path: str, body: Any) -> dict[str, Any]:
    with urllib3.PoolManager(ca_certs=str(plane.ca_file), retries=False) as http:
        content_type = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Authorization": f"Bearer {token}", "Content-Type": content_type}
        answer = http.request(method, plane.url + path, json=body, headers=headers, timeout=10.0)
    if answer.status >= 300:
        raise ApiRefused(f"{answer.status} {answer.data.decode()}")
    decoded: dict[str, Any] = answer.json()
    return decoded


@dataclass
class Clock:
    """An agent whose status a test sets."""

    at_s: float = 1000.0
    wall: datetime = field(default_factory=lambda: datetime(2026, 11, 21, tzinfo=UTC))

    def monotonic(self) -> float:
        return self.at_s

    def now(self) -> datetime:
        return self.wall

    def passes(self, seconds: float) -> None:
        self.at_s += seconds
        self.wall += timedelta(seconds=seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def status_writer(installed: ControlPlane, clock: Clock) -> Iterator[StatusWriter]:
    with publishing(installed, "agent-a", "agent-a") as publisher:
        yield StatusWriter(publisher, 30.0, clock.monotonic, clock.now, random.Random(1))


def sample(clock: Clock, used_bytes: int = 5, sm_ratio: float = 0.0) -> GPUNodeStatus:
    return status(used_bytes, clock.now().strftime("%Y-%m-%dT%H:%M:%S.%fZ"), sm_ratio)


def writes(plane: ControlPlane) -> dict[str, int]:
    """The API server's own counters: patches and creations of reports and of heartbeats."""
    with urllib3.PoolManager(ca_certs=str(plane.ca_file), retries=False) as http:
        headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
        text = http.request("GET", f"{plane.url}/metrics", headers=headers).data.decode()
    counted = {"status": 0, "lease": 0, "read": 0}
    for line in text.splitlines():
        if not line.startswith("apiserver_request_total{") or 'code="2' not in line:
            continue
        count = int(float(line.rpartition(" ")[2]))
        if 'resource="gpunodes"' in line and 'subresource="status"' in line:
            counted["status"] += count if 'verb="PATCH"' in line else 0
        elif 'resource="gpunodes"' in line and 'verb="GET"' in line:
            counted["read"] += count
        elif 'resource="leases"' in line and ('verb="PATCH"' in line or 'verb="POST"' in line):
            counted["lease"] += count
    return counted


class TestAnHour:
    """An hour of the agent's clock, sent to the API server as fast as it takes it, which counts."""

    def test_of_a_steady_node(
        self, installed: ControlPlane, status_writer: StatusWriter, clock: Clock
    ) -> None:
        before, figures = writes(installed), random.Random(2)
        for _ in range(int(HOUR_S / 5)):
            # What wobbles on a node where nothing happens.
            used_bytes = (10 << 30) + figures.randrange(1 << 20)
            status_writer.deliver(sample(clock, used_bytes, figures.uniform(0.4, 0.48)), clock.at_s)
            clock.passes(5.0)
        made = {kind: count - before[kind] for kind, count in writes(installed).items()}
        log.info("steady node, an hour: %s", made)
        assert made["lease"] <= 2 * 60
        assert made["status"] <= 60
        held = confirmation_of(lease(installed, "agent-a"))
        assert held is not None
        assert held.observed_at == reported(installed, "agent-a").observed_at

    @pytest.mark.parametrize(
        ("interval_s", "most"),
        [
            pytest.param(5.0, 720, id="sampled every 5 s: a write a sample"),
            pytest.param(0.25, 3600, id="triggered all the time: a write a second"),
        ],
    )
    def test_on_a_node_where_all_figures_change(
        self, clock: Clock, interval_s: float, most: int
    ) -> None:
        counting = Counting()
        status_writer = StatusWriter(counting, 30.0, clock.monotonic, clock.now, random.Random(1))
        figures = random.Random(3)
        with capture_logs():
            for i in range(int(HOUR_S / interval_s)):
                moved = sample(clock, figures.randrange(1 << 36), figures.random())
                pods = [PodUse(uid=f"uid-{i}", device="GPU-a")]
                status_writer.deliver(msgspec.structs.replace(moved, pods=pods), clock.at_s)
                clock.passes(interval_s)
        log.info("everything moves, every %s s, an hour: %s", interval_s, counting)
        assert most - 60 <= counting.reports <= most
        assert 115 <= counting.heartbeats <= 120

    def test_on_a_node_where_memory_and_sm_change(
        self, installed: ControlPlane, status_writer: StatusWriter, clock: Clock
    ) -> None:
        """Ten minutes of it at the API server: every sample is worth a write."""
        before, figures = writes(installed), random.Random(3)
        for _ in range(120):
            moved = sample(clock, figures.randrange(1 << 36), figures.random())
            status_writer.deliver(moved, clock.at_s)
            clock.passes(5.0)
        made = {kind: count - before[kind] for kind, count in writes(installed).items()}
        log.info("memory and SM move, ten minutes: %s", made)
        assert 100 <= made["status"] <= 120
        assert 18 <= made["lease"] <= 20


@dataclass
class Counting:
    """An API server that takes everything."""

    reports: int = 0
    heartbeats: int = 0

    def report(self, status: GPUNodeStatus) -> Held:
        self.reports += 1
        return Held()

    def held(self) -> Held:
        return Held()

    def reported(self) -> tuple[Held, str]:
        raise AssertionError("no other client writes")

    def heartbeat(self, now: datetime, vouch: Confirmation) -> str:
        self.heartbeats += 1
        return str(self.heartbeats)


class TestBadDays:
    def test_a_status_write_never_conflicts_with_reservations(
        self, installed: ControlPlane, status_writer: StatusWriter, clock: Clock
    ) -> None:
        """Reservations are written by compare-and-swap, for which a status write is a change."""
        lost, stop = 0, threading.Event()
        written: set[str] = set()

        def promise_on_and_on(store: Blocking) -> None:
            nonlocal lost
            for i in range(10_000):
                if stop.is_set():
                    return
                held = store.read_gpunode("agent-a")
                assert held is not None
                reservations = {f"uid-{i}": Reservation(namespace="default", name=f"p{i}")}
                try:
                    store.write_spec(held, GPUNodeSpec(reservations=reservations))
                except StoreConflict:
                    lost += 1
                else:
                    written.clear()
                    written.add(f"uid-{i}")

        configuration = installed.configuration()
        with Loop() as loop:
            store = loop.store(configuration, KubeApi(configuration))
            extender = threading.Thread(target=promise_on_and_on, args=(store,))
            extender.start()
            try:
                for used_bytes in range(100, 0, -1):
                    assert status_writer.deliver(sample(clock, used_bytes), clock.at_s) == math.inf
                    assert reported(installed, "agent-a").devices[0].used_bytes == used_bytes
                    clock.passes(1.0)
            finally:
                stop.set()
                extender.join()
        held = decode_gpunode(msgspec.json.encode(installed.call("GET", f"{GPUNODES}/agent-a")))
        assert set(held.spec.reservations) == written != set()
        log.info("100 statuses written; %d writes of reservations had to be repeated", lost)

    def test_later_reservations_are_no_reason_to_report_again(
        self, installed: ControlPlane, status_writer: StatusWriter, clock: Clock
    ) -> None:
        status_writer.deliver(sample(clock), clock.at_s)
        before = writes(installed)
        for figure in range(3):
            spec = {"spec": {"reserved": f"{figure}Gi"}}
            installed.call("PATCH", f"{GPUNODES}/agent-a", spec, "application/merge-patch+json")
            clock.passes(30.0)
            status_writer.deliver(sample(clock), clock.at_s)
        made = {kind: count - before[kind] for kind, count in writes(installed).items()}
        assert (made["status"], made["lease"]) == (0, 3)

    def test_a_status_of_another_writer_is_corrected(
        self, installed: ControlPlane, status_writer: StatusWriter, clock: Clock
    ) -> None:
        """As when a write of ours arrives that was given up long ago."""
        status_writer.deliver(sample(clock, 7), clock.at_s)
        with publishing(installed, "agent-a", "agent-a") as late:
            late.report(status(used_bytes=3, observed_at="2026-11-20T00:00:00Z"))
        clock.passes(30.0)
        status_writer.deliver(sample(clock, 7), clock.at_s)
        assert reported(installed, "agent-a").devices[0].used_bytes == 7
        held = confirmation_of(lease(installed, "agent-a"))
        assert held is not None
        assert held.observed_at == reported(installed, "agent-a").observed_at

    @pytest.mark.parametrize("year", [1970, 2038, 2200])
    def test_a_wrong_clock_is_reported_and_blocks_nothing(
        self, installed: ControlPlane, status_writer: StatusWriter, clock: Clock, year: int
    ) -> None:
        """The extender judges its age by its own clock (tests/state/test_clock_skew.py)."""
        for days_back, used_bytes in ((0, 8), (2, 7), (0, 6)):  # and it is set to and fro
            clock.wall = datetime(year, 6, 3, tzinfo=UTC) - timedelta(days=days_back)
            newest = sample(clock, used_bytes)
            assert status_writer.deliver(newest, clock.at_s) == math.inf
            assert reported(installed, "agent-a") == newest
            held = installed.call("GET", f"{LEASES}/agent-a")
            assert held["spec"]["renewTime"].startswith(clock.wall.strftime("%Y-%m-%dT"))
            vouched = confirmation_of(msgspec.convert(held, Lease))
            assert vouched is not None
            assert vouched.sampled_at == vouched.observed_at == newest.observed_at
            clock.passes(30.0)

    @pytest.mark.parametrize("how", ["freezes", "is killed"])
    def test_an_api_server_that_is_away_for_minutes_gets_the_newest_report_alone(
        self, installed: ControlPlane, clock: Clock, how: str
    ) -> None:
        with publishing(installed, "agent-a", "agent-a", timeout_s=0.5) as hasty:
            status_writer = StatusWriter(hasty, 30.0, clock.monotonic, clock.now, random.Random(1))
            self.goes_away(installed, status_writer, clock, how)

    def goes_away(
        self, installed: ControlPlane, status_writer: StatusWriter, clock: Clock, how: str
    ) -> None:
        def delivered(newest: GPUNodeStatus) -> bool:
            clock.passes(30.0)
            return status_writer.deliver(newest, clock.at_s) == math.inf

        until(lambda: delivered(sample(clock, 1)), "the first report is delivered")
        before = writes(installed)
        wanted_s: list[float] = []
        with capture_logs() as logs:
            if how == "freezes":
                installed.pause("kube-apiserver")
            else:
                installed.kill("kube-apiserver")
            try:
                for used_bytes in range(2, 42):  # 200 seconds of samples
                    clock.passes(5.0)
                    # Pods come and go all the while.
                    wanted_s.append(
                        status_writer.deliver(sample(clock, used_bytes << 30), clock.at_s)
                    )
            finally:
                if how == "freezes":
                    installed.resume("kube-apiserver")
                else:
                    installed.start_apiserver()
        tries = [each for each in logs if each["event"] == "report_not_delivered"]
        assert 6 <= len(tries) <= 12
        assert max(wanted_s) <= 30.0
        if how == "is killed":
            before = dict.fromkeys(before, 0)  # a new one counts from zero
        newest = sample(clock, 99 << 30)

        # A server that froze may apply old writes after the newest one, which the agent sees before
        # its next heartbeat and repairs.
        def settled() -> bool:
            return delivered(newest) and reported(installed, "agent-a") == newest

        until(settled, "the API server has the newest report")
        made = {kind: count - before[kind] for kind, count in writes(installed).items()}
        late = 0 if how == "is killed" else len(tries)
        assert made["status"] <= 1 + late * 2  # each late write, and its repair


class TestDeviceChoice:
    """The agent follows ``spec.deviceChoice`` of its own GPUNode, with its own token."""

    def choose(self, plane: ControlPlane, node: str, choice: str | None) -> None:
        path, patch = f"{GPUNODES}/{node}", {"spec": {"deviceChoice": choice}}
        plane.call("PATCH", path, patch, "application/merge-patch+json")

    @pytest.fixture
    def followed(self, installed: ControlPlane) -> Iterator[tuple[GPUNodeWatch, list[str | None]]]:
        self.choose(installed, "agent-a", None)
        seen: list[str | None] = []
        configuration = installed.configuration(token(installed, "agent-a"))
        configuration.no_proxy = "*"
        with ApiClient(configuration) as kube:
            watch = GPUNodeWatch(
                of_client(kube), "agent-a", lambda: seen.append(watch.device_choice)
            )
            assert watch.device_choice is None
            watch.start()
            until(lambda: seen == [""], "the choice at the start")
            yield watch, seen
            watch.stop()
            kube.rest_client.pool_manager.clear()
        self.choose(installed, "agent-a", None)

    def test_a_change_is_seen_and_those_of_other_nodes_are_not(
        self, installed: ControlPlane, followed: tuple[GPUNodeWatch, list[str | None]]
    ) -> None:
        _, seen = followed
        self.choose(installed, "agent-b", "pinned")
        with publishing(installed, "agent-a", "agent-a") as publisher:
            publisher.report(status(used_bytes=11))  # its object changes, its choice does not
        self.choose(installed, "agent-a", "steered")
        until(lambda: seen[-1] == "steered", "the change")
        assert seen == ["", "steered"]

    def test_the_ledger_is_followed(
        self, installed: ControlPlane, followed: tuple[GPUNodeWatch, list[str | None]]
    ) -> None:
        watch, seen = followed
        path, uid = f"{GPUNODES}/agent-a", "of-the-ledger"
        reservation = {"namespace": "ml", "name": "p", "charges": []}
        for held in (reservation, None):
            patch = {"spec": {"reservations": {uid: held}}}
            installed.call("PATCH", path, patch, "application/merge-patch+json")
            until(lambda held=held: (uid in watch.ledger.reservations) is bool(held), "the change")
        assert seen == [""]

    def test_it_is_seen_after_the_api_server_was_away(
        self, installed: ControlPlane, followed: tuple[GPUNodeWatch, list[str | None]]
    ) -> None:
        watch, seen = followed
        with capture_logs() as logs:
            installed.kill("kube-apiserver")
            until(lambda: logs, "that it is logged")
            assert watch.device_choice == ""  # what was known stays
            installed.start_apiserver()
        assert {each["event"] for each in logs} == {"gpunode_not_watched"}
        self.choose(installed, "agent-a", "steered")
        until(lambda: seen[-1] == "steered", "the change")
