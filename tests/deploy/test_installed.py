"""Applies the rendered objects to a real API server, and runs their programs with their settings.

The test has one installation, from its first object to its removal. Each step needs the previous
steps.
"""

import json
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from headroom.contract.console import CSRS, csr_name
from headroom.contract.gpunode_json import decode_gpunode
from headroom.kubectl.sessions import csr, new_secret
from tests.controlplane import STRANGER_TOKEN, ApiRefused, built
from tests.deploy.followed import (
    CONFIG,
    the_documented_helm_commands_work,
    the_documented_kustomize_commands_work,
    the_page_for_clusters_without_gpus_works,
    the_plugin_shows_nodes_and_decisions,
)
from tests.deploy.installation import (
    AGENT,
    CERTS,
    CONSOLE,
    EXTENDER,
    GPUNODES,
    USERS_PODS,
    WEBHOOK,
    AuditedPlane,
    Installation,
    token,
)
from tests.deploy.pages import commands, shell
from tests.deploy.prometheus import prometheus_can_only_read_metrics
from tests.deploy.rendered import NAMESPACE
from tests.deploy.test_permissions import Right, given
from tests.kubernetes_version import is_at_least
from tests.loopback import LOOPBACK
from tests.processes import starts_processes
from tests.waiting import until

BINARIES = (
    *("etcd", "kube-apiserver", "kube-scheduler", "kube-controller-manager"),
    *("kubectl", "helm"),
)
#: Suffix of the replica that an upgrade adds.
UPGRADED = "-upgraded"
VIEWER_TOKEN = "viewer-of-the-tests"
#: Permissions that are used only after faults, for example to evict pods that do not fit, to check
#: a Binding without a response, or to renew a certificate. An Event is applied with a patch, which
#: requires the permissions to create and to patch.
NOT_ON_A_QUIET_DAY: dict[str, set[Right]] = {
    EXTENDER: {
        ("", "pods/eviction", "create", ""),
        ("", "pods", "get", ""),
        ("", "events", "create", ""),
        # Used if a pod has to wait. tests/e2e/test_following.py uses this role.
        ("", "events", "patch", ""),
        ("coordination.k8s.io", "leases", "get", NAMESPACE),
        # Used if a group is partly bound. tests/e2e/test_partial_groups.py uses this role.
        ("scheduling.k8s.io", "podgroups", "get", ""),
        ("scheduling.x-k8s.io", "podgroups", "get", ""),
    },
    WEBHOOK: set(),
    CONSOLE: {
        # Used if a change of a pending pod could help. tests/e2e/test_following.py uses this role.
        ("", "resourcequotas", "list", ""),
    },
    AGENT: {
        # Used if Prometheus scrapes. tests/agent/test_agent_permissions.py uses this role.
        ("authentication.k8s.io", "tokenreviews", "create", ""),
        ("authorization.k8s.io", "subjectaccessreviews", "create", ""),
    },
    CERTS: {
        ("", "secrets", "patch", NAMESPACE),
    },
}
#: Permissions that a program uses but does not have. The agent works without them
#: (agent/probes/node_probe.py).
REFUSED: dict[str, set[Right]] = {
    EXTENDER: set(),
    WEBHOOK: set(),
    CONSOLE: set(),
    AGENT: {("", "nodes/proxy", "get", "")},
    CERTS: set(),
}


@pytest.fixture
@starts_processes
def installation(request: pytest.FixtureRequest) -> Iterator[Installation]:
    capture = request.config.pluginmanager.getplugin("capturemanager")
    # Show the progress of the build, because the first build takes minutes.
    with capture.global_and_fixture_disabled():
        built(*BINARIES)
    plane = AuditedPlane()
    try:
        plane.start()
        found = Installation(plane, "gpu-operator", "gpu-a", "gpu-b")
        yield found
        found.nodes.close()
    finally:
        plane.stop()


def the_api_server_accepts_every_object_without_a_warning(installation: Installation) -> None:
    namespace = {
        "metadata": {"name": NAMESPACE}
    }  # The content of the namespace can only be tested in an existing namespace.
    installation.plane.call("POST", "/api/v1/namespaces", namespace)
    shown = installation.apply("--dry-run=server").splitlines()
    assert len(shown) == len(installation.objects)
    assert all(line.endswith("serverside-applied (server dry run)") for line in shown)
    assert installation.listed(GPUNODES) == []  # The dry run has created nothing.
    installation.apply()


def pods_are_placed_with_the_settings_of_the_manifests(installation: Installation) -> None:
    plane = installation.plane
    shown = installation.make_certificates()
    assert "headroom-extender-tls" in shown
    installation.nodes.create()
    # Switch to enforce mode as the user's overlay does after a week in observe mode.
    own = {"data": {"headroom.yaml": "mode: enforce\n"}}
    plane.call("PATCH", CONFIG, own, "application/merge-patch+json")
    installation.start()
    installation.create_pod(
        "one", "16Gi"
    )  # The webhook responds, because it already waits for this as in a first installation.
    installation.settle()
    installation.nodes.look_around()
    installation.create_pod("two", "16Gi")
    installation.create_pod("large", "30Gi")
    for name in ("one", "two"):
        until(lambda name=name: installation.pod(name)["spec"].get("nodeName"), name)
        assert "headroom.gpu/placement" in installation.pod(name)["metadata"]["annotations"]
    installation.nodes.observe(installation.listed(USERS_PODS))
    reason = "insufficient GPU memory on any device"
    until(lambda: reason in installation.rejection("large"), "the large one is rejected")
    events = f"{USERS_PODS.removesuffix('pods')}events?fieldSelector=source=headroom"
    until(lambda: installation.listed(events), "an Event has the details")
    plane.call("DELETE", f"{USERS_PODS}/large", {"gracePeriodSeconds": 0})


def only_kube_scheduler_may_call_the_extender_on_loopback(installation: Installation) -> None:
    """Connect to the port as a user who may forward ports to the pod."""
    port = installation.verbs_port
    binding = {"PodName": "two", "PodNamespace": "default", "PodUID": "", "Node": "gpu-b"}
    with pytest.raises(httpx.TransportError):
        LOOPBACK.post(f"http://127.0.0.1:{port}/bind", json=binding)
    with pytest.raises(httpx.TransportError):
        LOOPBACK.post(f"https://127.0.0.1:{port}/bind", json=binding)


def kube_scheduler_elects_its_leader_with_our_lease(installation: Installation) -> None:
    path = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/headroom-scheduler"
    assert installation.plane.call("GET", path)["spec"]["holderIdentity"]


def probes_need_no_authentication(installation: Installation) -> None:
    """Probe as a kubelet does, with any client certificate."""
    deployment = installation.objects["Deployment", NAMESPACE, "headroom-scheduler"]
    webhook = installation.objects["Deployment", NAMESPACE, WEBHOOK]
    console = installation.objects["Deployment", NAMESPACE, CONSOLE]
    ports = {
        "debug-tls": installation.debug_port,
        "journal-tls": installation.journal_port,
        10259: installation.scheduler_port,
        "webhook": installation.webhook_port,
        "probes-tls": installation.webhook_probes_port,
    }
    asked = 0
    for container in (
        *deployment["spec"]["template"]["spec"]["containers"],
        *webhook["spec"]["template"]["spec"]["containers"],
        *console["spec"]["template"]["spec"]["containers"],
    ):
        for name, probe in container.items():
            if name.endswith("Probe"):
                get = probe["httpGet"]
                url = f"{get['scheme'].lower()}://127.0.0.1:{ports[get['port']]}{get['path']}"
                answer = LOOPBACK.get(url)
                assert (answer.status_code, answer.text.strip()) == (200, "ok"), url
                asked += 1
    assert asked == 11
    url = f"https://127.0.0.1:{installation.scheduler_port}/metrics"
    assert LOOPBACK.get(url).status_code in (401, 403)


def the_debug_api_rejects_unauthorized_readers_with_a_reason(
    installation: Installation,
) -> None:
    assert installation.answers("/readyz") == (200, "ok\n")
    status, shown = installation.answers("/v1/status")
    assert status == 401
    assert "token" in shown
    status, shown = installation.answers("/v1/status", STRANGER_TOKEN)
    assert status == 403
    assert "headroom-viewer (deploy/base/rbac.yaml)" in shown
    create = "create", "clusterrolebinding", "viewer", "--clusterrole=headroom-viewer"
    installation.plane.kubectl(*create, "--user=headroom-viewer")
    until(lambda: installation.answers("/v1/status", VIEWER_TOKEN)[0] == 200, "it is let in")
    secret = new_secret()
    installation.plane.call("POST", CSRS, csr(secret))
    assert installation.answers("/v1/status", session=secret)[0] == 200
    installation.plane.call("DELETE", f"{CSRS}/{csr_name(secret)}")
    assert "headroom_console_ready 1.0" in installation.answers("/metrics", VIEWER_TOKEN)[1]
    assert "headroom_ready 1.0" in installation.journal_answers("/metrics", VIEWER_TOKEN)[1]
    # The extender serves no views, and it serves nothing without a token.
    assert installation.journal_answers("/v1/nodes", VIEWER_TOKEN)[0] == 404
    assert installation.journal_answers("/v1/journal")[0] == 401
    assert installation.journal_answers("/v1/journal", STRANGER_TOKEN)[0] == 403
    until(
        lambda: {"one", "two"} <= decided(installation),
        "the console reads the journal, by its own token",
    )
    installation.plane.kubectl("delete", "clusterrolebinding", "viewer")


def decided(installation: Installation) -> set[str]:
    """Return the pods whose decisions the console shows."""
    shown = json.loads(installation.answers("/v1/decisions", VIEWER_TOKEN)[1])
    return {each["name"] for each in shown["decisions"]}


def asked(installation: Installation, account: str) -> dict[Right, set[int]]:
    """Return the statuses of the calls that an account has made for the kinds in our roles."""
    found: dict[Right, set[int]] = {}
    for event in installation.plane.asked(account):
        reference = event.get("objectRef", {})
        if event["userAgent"].startswith("kube-scheduler") or not reference:
            continue
        resource = reference["resource"]
        if reference.get("subresource"):
            resource += f"/{reference['subresource']}"
        right = (reference.get("apiGroup", ""), resource, event["verb"])
        where = reference.get("namespace", "")
        everywhere = (*right, "") in given(account)
        key = (*right, "" if everywhere else where)
        found.setdefault(key, set()).add(event["responseStatus"]["code"])
    return found


def the_calls_of_each_account_match_its_roles(installation: Installation) -> None:
    for account in (EXTENDER, WEBHOOK, CONSOLE, AGENT, CERTS):
        found = asked(installation, account)
        refused = {right for right, codes in found.items() if 403 in codes}
        assert refused == REFUSED[account], account
        assert found.keys() - REFUSED[account] <= given(account), account
        until(
            lambda account=account: unused(installation, account) <= NOT_ON_A_QUIET_DAY[account],
            f"{account} uses all its rights",
            logs=lambda account=account: str(unused(installation, account)),
        )


def unused(installation: Installation, account: str) -> set[Right]:
    """Return the permissions that the account has not used yet."""
    rights = given(account) - asked(installation, account).keys()
    return {right for right in rights if is_served(right)}


def is_served(right: Right) -> bool:
    """Return whether the API server serves the kind. DRA has a stable API in Kubernetes 1.34 and
    newer.
    """
    group, *_ = right
    return group != "resource.k8s.io" or is_at_least("1.34")


#: Resources that Kubernetes 1.37 lets every user or every service account access.
GRANTED_TO_ALL = ("selfsubject", "clustertrustbundles")


def the_agents_account_has_no_other_permission(installation: Installation) -> None:
    """Check the list of permissions that the API server computes from all bindings."""
    plane = installation.plane
    (file,) = (plane.folder / "agent.kubeconfig",)
    plane.write_kubeconfig(file, {"token": token(plane, AGENT)}, NAMESPACE)
    review = {"spec": {"namespace": NAMESPACE}}
    command = [str(built("kubectl")["kubectl"]), f"--kubeconfig={file}", "create", "--raw"]
    shown = subprocess.run(
        [*command, "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", "-f", "-"],
        input=json.dumps(
            {"kind": "SelfSubjectRulesReview", "apiVersion": "authorization.k8s.io/v1", **review}
        ),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    rules = json.loads(shown)["status"]["resourceRules"]
    may = {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        if not resource.startswith(GRANTED_TO_ALL)
    }
    assert may == {right[:3] for right in given(AGENT)}


#: Calls that must be forbidden. Each has an account, a method and a path.
FORBIDDEN = (
    (EXTENDER, "GET", f"/api/v1/namespaces/{NAMESPACE}/secrets"),
    (EXTENDER, "GET", "/api/v1/secrets"),
    (CONSOLE, "GET", f"/api/v1/namespaces/{NAMESPACE}/secrets"),
    (CONSOLE, "GET", "/api/v1/namespaces/kube-system/configmaps"),
    (WEBHOOK, "GET", f"/api/v1/namespaces/{NAMESPACE}/secrets"),
    (WEBHOOK, "GET", "/api/v1/pods"),
    (AGENT, "GET", f"/api/v1/namespaces/{NAMESPACE}/secrets/headroom-extender-tls"),
    (AGENT, "GET", "/api/v1/pods"),
    (CERTS, "GET", f"/api/v1/namespaces/{NAMESPACE}/secrets"),
    (CERTS, "GET", "/api/v1/namespaces/default/secrets/any"),
)


def no_account_can_read_secrets_or_unrelated_objects(installation: Installation) -> None:
    plane = installation.plane
    for account, method, path in FORBIDDEN:
        head = {"Authorization": f"Bearer {token(plane, account)}"}
        answer = LOOPBACK.request(method, plane.url + path, headers=head)
        assert answer.status_code == 403, (account, path)
        assert "cannot" in answer.json()["message"]


def created(installation: Installation, name: str, vram: str) -> bool:
    """Create an object as a controller does. Return False if a webhook does not respond, so that
    the caller retries.
    """
    try:
        installation.create_pod(name, vram)
    except ApiRefused as err:
        if "failed calling webhook" not in str(err):
            raise
        return False
    return True


def no_pod_is_lost_and_no_bind_fails_in_an_upgrade_under_load(installation: Installation) -> None:
    """Upgrade as the Deployment does. The new pod is ready before the old pod ends, and pods are
    created continuously.
    """
    lease = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/headroom-scheduler"
    plane = installation.plane
    before = plane.call("GET", lease)["spec"]["holderIdentity"]
    names = [f"load-{i}" for i in range(26)]
    upgraded = threading.Event()

    def load() -> None:
        for i, name in enumerate(names):
            until(lambda name=name: created(installation, name, "256Mi"), f"{name} is created")
            if i < len(names) // 2:
                upgraded.wait(0.2)  # Create half of the pods before the upgrade.

    with ThreadPoolExecutor(1) as hands:
        loading = hands.submit(load)
        installation.start(UPGRADED)
        installation.end()
        upgraded.set()
        loading.result()

    def bound() -> bool:
        pods = installation.listed(USERS_PODS)
        installation.nodes.observe(pods)
        # Report as agents do, because on a busy machine reports would become stale during the
        # upgrade.
        installation.nodes.report(installation.nodes.names)
        return all(pod["spec"].get("nodeName") for pod in pods)

    def waiting() -> str:
        pods = installation.listed(USERS_PODS)
        return "\n".join(str(pod["status"]) for pod in pods if not pod["spec"].get("nodeName"))

    until(bound, "all are bound", every_s=1.0, logs=waiting)
    assert plane.call("GET", lease)["spec"]["holderIdentity"] != before
    codes = [
        each["responseStatus"]["code"]
        for each in plane.asked(EXTENDER)
        if each.get("objectRef", {}).get("subresource") == "binding"
    ]
    assert codes.count(201) == len(names) + len(("one", "two"))
    assert set(codes) <= {201, 409}  # Bindings with status 409 are retried.
    sits: Counter[str] = Counter()
    for each in installation.listed(GPUNODES):
        status = decode_gpunode(json.dumps(each).encode()).status
        assert status is not None
        for use in status.pods:
            sits[use.device] += use.used_bytes or 0
        for device in status.devices:
            assert sits[device.uuid] <= device.memory_bytes
    assert sum(sits.values()) == 2 * (16 << 30) + len(names) * (256 << 20)


def uninstallation_leaves_only_the_pods_of_users(
    installation: Installation,
) -> None:
    """Run the commands of docs/operate/uninstall.md unchanged."""
    plane = installation.plane
    nodes = {
        each["metadata"]["name"]: each["spec"] for each in installation.listed("/api/v1/nodes")
    }
    plane.start_controller_manager()
    # Stop the processes of the Deployment and the DaemonSet, because there is no kubelet.
    installation.end(UPGRADED)
    for pod in installation.listed(f"/api/v1/namespaces/{NAMESPACE}/pods"):
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod['metadata']['name']}"
        plane.call("DELETE", path, {"gracePeriodSeconds": 0})
    run = shell(plane.folder, plane.kubeconfig())
    for block in commands("operate/uninstall.md", "uninstall"):
        output, status = run(
            block.replace("-k deploy/overlays/OVERLAY", f"-f {installation.manifest}")
        )
        assert status == 0, output
    served = plane.kubectl("api-resources", "--verbs=list", "-o", "name").split()
    assert not [name for name in served if name.endswith(".headroom.gpu")]
    labelled = ",".join(name for name in served if not name.startswith("componentstatuses"))
    label = "--selector=app.kubernetes.io/part-of=headroom"
    left = plane.kubectl("get", labelled, "-A", label, "-o", "name").split()
    assert left == []
    with pytest.raises(ApiRefused, match=": 404 "):
        plane.call("GET", f"/api/v1/namespaces/{NAMESPACE}")
    for pod in installation.listed(USERS_PODS):
        assert pod["spec"]["nodeName"] in nodes
        ours = {key for key in pod["metadata"].get("annotations", {}) if "headroom.gpu/" in key}
        assert ours == {"headroom.gpu/vram"}  # The user has set this annotation.
    after = {
        each["metadata"]["name"]: each["spec"] for each in installation.listed("/api/v1/nodes")
    }
    assert after == nodes


def test_an_installation_works_from_its_first_object_to_its_removal(
    installation: Installation, subtests: pytest.Subtests
) -> None:
    for step in (
        the_api_server_accepts_every_object_without_a_warning,
        pods_are_placed_with_the_settings_of_the_manifests,
        the_plugin_shows_nodes_and_decisions,
        only_kube_scheduler_may_call_the_extender_on_loopback,
        kube_scheduler_elects_its_leader_with_our_lease,
        probes_need_no_authentication,
        the_debug_api_rejects_unauthorized_readers_with_a_reason,
        prometheus_can_only_read_metrics,
        the_calls_of_each_account_match_its_roles,
        the_agents_account_has_no_other_permission,
        no_account_can_read_secrets_or_unrelated_objects,
        no_pod_is_lost_and_no_bind_fails_in_an_upgrade_under_load,
        uninstallation_leaves_only_the_pods_of_users,
        the_documented_helm_commands_work,
        the_documented_kustomize_commands_work,
        the_page_for_clusters_without_gpus_works,
    ):
        with subtests.test(step.__name__):
            step(installation)
