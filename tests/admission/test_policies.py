"""Tests which writes the policies permit or reject in a real API server, and the messages of
rejections.
"""

from typing import Any

import msgspec
import pytest
import yaml

from benchmarks.vitals import vitals
from headroom.contract.annotations import EXTENDER_ANNOTATION_PREFIXES, EXTENDER_ANNOTATIONS
from headroom.contract.gate import gate_container, is_gated
from headroom.contract.kube import Pod
from tests.admission.policy_site import (
    BOUND,
    GPUNODE,
    HERE,
    OTHER,
    WAITING,
    bind,
    documented,
    noted,
    rejected,
    site,
)
from tests.admission.reviews import container, manifest
from tests.admission.site import (
    ADMISSION,
    AGENT,
    AT_ONCE,
    EXTENDER,
    GPUNODES,
    NODES,
    PODS,
    Reply,
    Site,
    manifests,
)
from tests.builders import GPU
from tests.controlplane import ADMIN_TOKEN, ControlPlane
from tests.waiting import until

__all__ = ["site"]

NO_GPU = {"limits": {"cpu": "1", "memory": "1Gi", "ephemeral-storage": "1Gi", "a.b/c": "1"}}


class TestAnnotations:
    POLICY = "headroom-pod-annotations"

    @pytest.mark.parametrize(
        "key", [*EXTENDER_ANNOTATIONS, *(f"{key}0" for key in EXTENDER_ANNOTATION_PREFIXES)]
    )
    @pytest.mark.parametrize("how", ["created", "changed", "by its status"])
    def test_no_other_client_can_write_headrooms_annotations(
        self, site: Site, key: str, how: str
    ) -> None:
        reported = (
            f"annotation {key} is written only by Headroom, when it places the pod; leave it out"
        )
        if how == "created":
            reply = site.send("POST", PODS, manifest(annotations={key: "x"}))
        else:
            path = f"{PODS}/{WAITING}" + ("/status" if how == "by its status" else "")
            reply = site.send("PATCH", path, noted(key, "x"))
        rejected(reply, self.POLICY, reported)

    @pytest.mark.parametrize("key", ["headroom.gpu/retry", "headroom.gpu/limit-bytes.63"])
    @pytest.mark.parametrize("others", [0, 15, 16, 300])
    def test_no_other_client_can_write_them_among_many_other_annotations(
        self, site: Site, key: str, others: int
    ) -> None:
        """The policy uses another expression if a pod has many annotations."""
        annotations = {f"team/{index}": "" for index in range(others)}
        for more, status in (({}, 201), ({key: "x"}, 403)):
            obj = manifest(None, container(gpus=0), annotations=annotations | more)
            reply = site.send("POST", f"{PODS}?dryRun=All", obj)
            assert reply.status == status
        rejected(reply, self.POLICY, f"annotation {key} is written only by Headroom")

    def test_no_other_client_can_remove_them(self, site: Site) -> None:
        reply = site.send("PATCH", f"{PODS}/{BOUND}", noted("headroom.gpu/placement", None))
        rejected(reply, self.POLICY, "is written only by Headroom")

    @pytest.mark.parametrize(
        ("text", "reported"),
        [
            ("16Gi", "from '8Gi' to '16Gi'"),
            ("1Gi", "from '8Gi' to '1Gi'"),
            (None, "from '8Gi' to ''"),
        ],
    )
    @pytest.mark.parametrize("subresource", ["", "/status"])
    def test_the_request_of_a_bound_pod_cannot_be_changed(
        self, site: Site, text: str | None, reported: str, subresource: str
    ) -> None:
        path = f"{PODS}/{BOUND}{subresource}"
        rejected(
            site.send("PATCH", path, noted("headroom.gpu/vram", text)),
            self.POLICY,
            f"annotation headroom.gpu/vram of a bound pod cannot be changed, {reported}: its "
            "reservation does not change; delete the pod and create it again with the new value",
        )

    def test_a_bound_pod_may_be_exposed_to_eviction_for_its_overuse(self, site: Site) -> None:
        path = f"{PODS}/{BOUND}"
        for text in ("evict", "report", None):
            reply = site.send("PATCH", path, noted("headroom.gpu/on-overuse", text))
            assert reply.status == 200
        rejected(
            site.send("PATCH", path, noted("headroom.gpu/on-overuse", "never")),
            self.POLICY,
            "annotation headroom.gpu/on-overuse: 'never' is not one of report, evict. Example: "
            "headroom.gpu/on-overuse: evict",
        )
        both = {"headroom.gpu/on-overuse": "evict", "headroom.gpu/vram": "1Gi"}
        reply = site.send("PATCH", path, {"metadata": {"annotations": both}})
        rejected(
            reply, self.POLICY, "annotation headroom.gpu/vram of a bound pod cannot be changed"
        )

    def test_the_limit_of_a_bound_pod_cannot_be_changed(self, site: Site) -> None:
        rejected(
            site.send("PATCH", f"{PODS}/{BOUND}", noted("headroom.gpu/vram-limit", "20Gi")),
            self.POLICY,
            "annotation headroom.gpu/vram-limit of a bound pod cannot be changed, from '' to "
            "'20Gi'",
        )

    def test_a_pending_pod_may_reduce_its_request(self, site: Site) -> None:
        path = f"{PODS}/{WAITING}"
        assert site.send("PATCH", path, noted("headroom.gpu/vram", "4Gi")).status == 200

    @pytest.mark.parametrize("resource", ["headroom.gpu/vram", "headroom.gpu/vram-bytes"])
    def test_the_request_of_a_pod_that_quotas_counted_cannot_be_changed(
        self, site: Site, resource: str
    ) -> None:
        counted = container()
        for each in counted["resources"].values():
            each[resource] = "8192"
        obj = manifest("8Gi", counted, schedulerName="headroom")
        obj["metadata"]["name"] = resource.replace("/", "-")
        assert site.send("POST", PODS, obj).status == 201
        path = f"{PODS}/{obj['metadata']['name']}"
        for key in ("headroom.gpu/vram", "headroom.gpu/processes"):
            reply = site.send("PATCH", path, noted(key, "4"))
            rejected(
                reply,
                self.POLICY,
                f"annotation {key} cannot be changed: quotas counted resource {resource} of the "
                "pod when it was created; delete the pod and create it again with the new value",
            )
            if (key, resource) == ("headroom.gpu/vram", "headroom.gpu/vram"):
                documented(reply)
        reply = site.send("PATCH", f"{path}/status", noted("headroom.gpu/vram", "20Gi"))
        rejected(reply, self.POLICY, "annotation headroom.gpu/vram cannot be changed")
        for key in ("headroom.gpu/policy", "team/note"):
            assert site.send("PATCH", path, noted(key, "pack")).status == 200

    def test_the_maximum_number_of_annotations_does_not_delay_a_pods_kubelet(
        self, site: Site
    ) -> None:
        """The API server needs less than a second of CPU for such a request. If the policies
        checked each annotation, it would need minutes. On a busy machine, the request times out
        after 34 s and is sent again.
        """
        annotations = {f"{index:x}": "" for index in range(60_000)}
        obj = manifest(None, container(gpus=0), annotations=annotations, nodeName=HERE)
        obj["metadata"]["name"] = "noted-much"
        status = {"status": {"phase": "Running"}}
        pid, replies = site.plane.pid("kube-apiserver"), list[Reply]()

        def is_accepted(method: str, path: str, body: dict[str, Any]) -> bool:
            before_s = vitals(pid).cpu_s
            kubelet = HERE if path.endswith("/status") else ""
            replies.append(site.send(method, path, body, kubelet_of=kubelet))
            assert vitals(pid).cpu_s - before_s < 8
            assert replies[-1].status in (200, 201, 409, 504), replies[-1].message
            return replies[-1].status != 504

        until(lambda: is_accepted("POST", PODS, obj), "the pod is created")
        path = f"{PODS}/noted-much/status"
        until(lambda: is_accepted("PATCH", path, status), "its kubelet writes the status")
        assert site.send("DELETE", f"{PODS}/noted-much", AT_ONCE).status == 200

    def test_other_annotations_are_not_checked(self, site: Site) -> None:
        assert site.send("PATCH", f"{PODS}/{BOUND}", noted("team/note", "x")).status == 200

    def test_a_binding_of_another_client_cannot_add_headrooms_annotations(
        self, site: Site, plane: ControlPlane
    ) -> None:
        for key, reported in (
            ("headroom.gpu/placement", "is written only by Headroom"),
            ("headroom.gpu/vram", "may be set only by Headroom's own Bindings"),
        ):
            rejected(bind(site, WAITING, ADMIN_TOKEN, {key: "x"}), self.POLICY, reported)


@pytest.fixture(scope="module")
def gated(site: Site) -> Site:
    """The site with an unbound, gated pod."""
    gates = [gate_container("registry.example/headroom-agent:1"), container("warm-up", 0)]
    obj = manifest("8Gi", schedulerName="headroom", initContainers=gates)
    obj["metadata"]["name"] = "gated"
    assert site.send("POST", PODS, obj).status == 201
    return site


class TestGates:
    """Tests the rules that keep the author of a pod from opening the gate of a bound pod."""

    POLICY = "headroom-gates"
    PATH = f"{PODS}/gated"

    def test_a_stored_gate_with_all_default_fields_is_recognised(self, gated: Site) -> None:
        """The stored gate contains fields that the API server has added."""
        stored = msgspec.convert(gated.send("GET", self.PATH).body, Pod)
        assert is_gated(stored, "registry.example/headroom-agent:1")

    def test_the_image_of_a_gate_cannot_be_changed(self, gated: Site) -> None:
        strategic = "application/strategic-merge-patch+json"

        def change(name: str, image: str) -> Reply:
            spec = {"initContainers": [{"name": name, "image": image}]}
            path = f"{self.PATH}?dryRun=All"
            return gated.send("PATCH", path, {"spec": spec}, content_type=strategic)

        reply = change("headroom-gate", "busybox")
        rejected(reply, self.POLICY, "headroom-gate cannot be changed")
        documented(reply)
        assert change("warm-up", "busybox").status == 200

    def test_a_gate_cannot_run_another_command(self, gated: Site) -> None:
        def run(name: str) -> Reply:
            return gated.send("POST", f"{self.PATH}/exec?container={name}&command=sh")

        reply = run("headroom-gate")
        rejected(reply, self.POLICY, "commands cannot be run in init container headroom-gate")
        documented(reply)
        assert "does not have a host assigned" in run("warm-up").message

    def test_a_pod_at_its_gate_cannot_be_debugged(self, gated: Site) -> None:
        strategic = "application/strategic-merge-patch+json"
        added = {"spec": {"ephemeralContainers": [{"name": "debug", "image": "busybox"}]}}

        def debug(name: str) -> Reply:
            path = f"{PODS}/{name}/ephemeralcontainers?dryRun=All"
            return gated.send("PATCH", path, added, content_type=strategic)

        reply = debug("gated")
        rejected(reply, self.POLICY, "a pod can be debugged once init container")
        documented(reply)
        assert debug(WAITING).status == 200
        ended = {"name": "headroom-gate", "state": {"terminated": {"exitCode": 0}}}
        ended |= {"image": "i", "imageID": "i", "ready": True, "restartCount": 0}
        status = {"status": {"initContainerStatuses": [ended]}}
        assert gated.send("PATCH", f"{self.PATH}/status", status).status == 200
        assert debug("gated").status == 200


@pytest.fixture(scope="module")
def token(site: Site) -> str:
    return site.token(EXTENDER)


class TestStolenToken:
    """Tests what a stolen token of the extender permits. kube-scheduler in the same pod uses this
    token too.
    """

    POLICY = "headroom-extender-pods"

    @pytest.mark.parametrize(
        ("path", "patch", "reported"),
        [
            pytest.param(
                "",
                {"spec": {"containers": [{"name": "main", "image": "evil"}]}},
                "this changes the spec",
                id="an image",
            ),
            pytest.param(
                "", {"spec": {"activeDeadlineSeconds": 1}}, "this changes the spec", id="a deadline"
            ),
            pytest.param(
                "", {"metadata": {"labels": {"app": "x"}}}, "labels, owners", id="a label"
            ),
            pytest.param(
                "", {"metadata": {"finalizers": ["a/b"]}}, "or finalizers", id="a finalizer"
            ),
            pytest.param(
                "",
                {"metadata": {"annotations": {"team/note": "x"}}},
                "this changes team/note",
                id="an annotation",
            ),
            pytest.param(
                "/status",
                {"metadata": {"annotations": {"headroom.gpu/retry": "x"}}},
                "this changes headroom.gpu/retry",
                id="our annotation by the status",
            ),
            pytest.param(
                "/status", {"status": {"phase": "Failed"}}, "this changes phase", id="the phase"
            ),
            pytest.param(
                "/status",
                {"status": {"podIPs": [{"ip": "10.0.0.9"}], "podIP": "10.0.0.9"}},
                "this changes podIP",
                id="the address",
            ),
        ],
    )
    def test_a_stolen_token_cannot_change_pods(
        self, site: Site, token: str, path: str, patch: dict[str, Any], reported: str
    ) -> None:
        before = site.send("GET", f"{PODS}/{WAITING}").body
        # Patch the container by its name, as kubectl does.
        kind = "application/strategic-merge-patch+json"
        reply = site.send("PATCH", f"{PODS}/{WAITING}{path}", patch, token, kind)
        rejected(reply, self.POLICY, reported)
        assert site.send("GET", f"{PODS}/{WAITING}").body == before

    def test_a_stolen_token_cannot_debug_pods(self, site: Site, token: str) -> None:
        strategic = "application/strategic-merge-patch+json"
        added = {"spec": {"ephemeralContainers": [{"name": "debug", "image": "busybox"}]}}
        path = f"{PODS}/{WAITING}/ephemeralcontainers"
        reply = site.send("PATCH", path, added, token, strategic)
        rejected(reply, self.POLICY, "the extender neither resizes pods nor debugs them")
        documented(reply)

    def test_a_stolen_token_cannot_write_a_pod_with_more_annotations_than_a_gpu_pod_may_have(
        self, site: Site, token: str
    ) -> None:
        obj = manifest(annotations={f"team/{i}": "" for i in range(256)}, schedulerName="headroom")
        obj["metadata"]["name"] = "noted"
        assert site.send("POST", PODS, obj).status == 201
        reply = site.send("PATCH", f"{PODS}/noted", noted("headroom.gpu/retry", "1"), token)
        reported = "the extender does not write pods that have more than 256 annotations"
        rejected(reply, self.POLICY, reported)
        documented(reply)

    @pytest.mark.parametrize("what", ["annotations", "labels"])
    def test_a_stolen_token_cannot_add_foreign_annotations_with_a_binding(
        self, site: Site, token: str, what: str
    ) -> None:
        brought = {"annotations": {}, "labels": {}} | {what: {"team/note": "x"}}
        reply = bind(site, WAITING, token, **brought)
        rejected(reply, self.POLICY, "this changes team/note")
        documented(reply)
        assert "nodeName" not in site.send("GET", f"{PODS}/{WAITING}").body["spec"]

    def test_the_extender_and_kube_scheduler_can_do_their_work(
        self, site: Site, token: str
    ) -> None:
        """The extender requeues a pod, and kube-scheduler writes the condition and the
        nomination.
        """
        path = f"{PODS}/{WAITING}"
        assert site.send("PATCH", path, noted("headroom.gpu/retry", "1"), token).status == 200
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        status = {"status": {"conditions": [condition], "nominatedNodeName": HERE}}
        assert site.send("PATCH", f"{path}/status", status, token).status == 200

    def test_kube_scheduler_can_write_the_node_resources_of_dra_devices(
        self, site: Site, token: str
    ) -> None:
        """Without its feature gate, the API server drops the field. Run this test with
        TEST_GATES=DRANodeAllocatableResources=true.
        """
        claiming = container("main", 0)
        claiming["resources"]["claims"] = [{"name": "nic"}]
        claims = [{"name": "nic", "resourceClaimName": "nic-1"}]
        obj = manifest("8Gi", claiming, schedulerName="headroom", resourceClaims=claims)
        obj["metadata"]["name"] = "claiming"
        assert site.send("POST", PODS, obj).status == 201
        mapping = [{"name": "memory", "quantity": "1Gi"}]
        taken = {"resourceClaimName": "nic-1", "containers": ["main"], "mapping": mapping}
        status = {"status": {"nodeAllocatableResourceClaimStatuses": [taken]}}
        reply = site.send("PATCH", f"{PODS}/claiming/status", status, token)
        assert reply.status == 200, reply.body

    @pytest.mark.parametrize(
        ("patch", "reported"),
        [
            ({"metadata": {"labels": {"a": "b"}}}, "this changes labels or annotations"),
            ({"status": {"capacity": {"nvidia.com/gpu": "64"}}}, "this changes capacity"),
            (
                {"status": {"allocatable": {"headroom.gpu/vram": "1", "cpu": "9"}}},
                "this changes allocatable",
            ),
            ({"status": {"nodeInfo": {"machineID": "x"}}}, "this changes nodeInfo"),
        ],
    )
    def test_a_stolen_token_can_write_only_the_memory_of_a_node(
        self, site: Site, token: str, patch: dict[str, Any], reported: str
    ) -> None:
        path = f"/api/v1/nodes/{HERE}/status"
        rejected(site.send("PATCH", path, patch, token), "headroom-extender-nodes", reported)
        amounts = {"headroom.gpu/vram": "81920"}
        own = {"status": {"capacity": amounts, "allocatable": amounts}}
        assert site.send("PATCH", path, own, token).status == 200
        gone = {"status": {"capacity": {"headroom.gpu/vram": None}}}
        assert site.send("PATCH", path, gone, token).status == 200


class TestLedger:
    POLICY = "headroom-gpunode-spec"

    def test_no_other_client_creates_a_gpunode(self, site: Site) -> None:
        body = {**GPUNODE, "metadata": {"name": "of-mine"}, "spec": {}}
        rejected(site.send("POST", GPUNODES, body), self.POLICY, "only Headroom's extender creates")

    @pytest.mark.parametrize(
        "patch", [{"spec": {"initialised": False}}, {"spec": {"reservations": {}}}, {"spec": None}]
    )
    def test_no_other_client_writes_reservations(self, site: Site, patch: dict[str, Any]) -> None:
        reply = site.send("PATCH", f"{GPUNODES}/{HERE}", patch)
        rejected(reply, self.POLICY, "spec of a GPUNode is the ledger")

    def test_finalizers_can_be_removed(self, site: Site) -> None:
        """Uninstalling Headroom removes the finalizers."""
        reply = site.send("PATCH", f"{GPUNODES}/{HERE}", {"metadata": {"finalizers": None}})
        assert reply.status == 200

    def test_an_agent_can_report_only_on_its_own_node(self, site: Site) -> None:
        report = {"status": {"observedAt": "2026-11-21T00:00:00Z"}}
        own, other = (f"{GPUNODES}/{node}/status" for node in NODES)
        token = site.token(AGENT, HERE)
        assert site.send("PATCH", own, report, token).status == 200
        rejected(
            site.send("PATCH", other, report, token),
            "headroom-agent-own-node",
            f"an agent on node {HERE} may write only what is named {HERE}, not {OTHER}",
        )
        assert site.send("PATCH", other, report, site.token(AGENT, OTHER)).status == 200


class TestOtherSchedulers:
    POLICY = "headroom-other-schedulers"
    SAID = "a pod that requests a GPU must be placed by Headroom"

    @pytest.mark.parametrize(
        "spec",
        [
            {"schedulerName": "default-scheduler"},
            {"schedulerName": "kai-scheduler"},
            {"schedulerName": "headroom", "nodeName": OTHER},
        ],
    )
    def test_pods_of_other_schedulers_get_a_warning_by_default(
        self, site: Site, spec: dict[str, str]
    ) -> None:
        reply = site.send("POST", f"{PODS}?dryRun=All", manifest(**spec))
        assert reply.status == 201
        (shown,) = reply.warnings
        assert self.SAID in shown

    @pytest.mark.parametrize(
        "amounts",
        [
            {"cpu": "1", "memory": "1Gi", GPU: "1"},
            {"memory": "1Gi", "ephemeral-storage": "1Gi", f"{GPU}.shared": "1"},
            {"nvidia.com/mig-1g.10gb": "1"},
            {"cpu": "1", "hugepages-2Mi": "2Mi", "memory": "1Gi", "nvidia.com/mig-9g.900gb": "1"},
        ],
    )
    @pytest.mark.parametrize("role", ["containers", "initContainers"])
    def test_pods_of_other_schedulers_get_a_warning_whatever_else_they_request(
        self, site: Site, amounts: dict[str, str], role: str
    ) -> None:
        one = container("other", resources={"limits": amounts, "requests": amounts})
        obj = manifest(None, container(gpus=0))
        obj["spec"].setdefault(role, []).append(one)
        reply = site.send("POST", f"{PODS}?dryRun=All", obj)
        assert (reply.status, len(reply.warnings)) == (201, 1), reply.message

    @pytest.mark.parametrize(
        ("path", "obj"),
        [
            pytest.param(PODS, manifest(schedulerName="headroom"), id="ours"),
            pytest.param(PODS, manifest(None, container(gpus=0)), id="no GPU"),
            pytest.param(PODS, manifest(None, container(resources=NO_GPU)), id="other resources"),
            pytest.param(PODS.replace("-team", "-opted-out"), manifest(), id="opted out"),
        ],
    )
    def test_other_pods_get_no_warning(self, site: Site, path: str, obj: dict[str, Any]) -> None:
        reply = site.send("POST", f"{path}?dryRun=All", obj)
        assert (reply.status, reply.warnings) == (201, ())

    def test_pods_of_other_schedulers_are_denied_with_a_component(self, site: Site) -> None:
        path = f"{ADMISSION}/validatingadmissionpolicybindings/{self.POLICY}"
        (component,) = manifests("components/deny-other-schedulers/kustomization.yaml")
        patches = [yaml.safe_load(each["patch"]) for each in component["patches"]]
        (patch,) = (each for each in patches if each["metadata"]["name"] == self.POLICY)

        def is_denied() -> bool:
            return site.send("POST", f"{PODS}?dryRun=All", manifest()).status == 403

        assert site.send("PATCH", path, patch).status == 200
        try:
            until(is_denied, "they are denied")
            reply = site.send("POST", PODS, manifest())
            rejected(reply, self.POLICY, self.SAID)
            documented(reply)
            self.only_a_kubelet_can_create_static_pods_of_its_node(site)
            self.the_gpu_operator_can_create_its_validator(site)
        finally:
            back = {"spec": {"validationActions": ["Warn", "Audit"]}}
            site.send("PATCH", path, back)
            until(lambda: not is_denied(), "they are warned of again")

    def only_a_kubelet_can_create_static_pods_of_its_node(self, site: Site) -> None:
        static = manifest(nodeName=HERE, annotations={"kubernetes.io/config.mirror": "x"})
        rejected(site.send("POST", PODS, static), self.POLICY, self.SAID)
        rejected(site.send("POST", PODS, static, kubelet_of=OTHER), self.POLICY, self.SAID)
        reply = site.send("POST", f"{PODS}?dryRun=All", static, kubelet_of=HERE)
        assert (reply.status, reply.warnings) == (201, ()), reply.message

    def the_gpu_operator_can_create_its_validator(self, site: Site) -> None:
        """The operator's validator creates a pod with a node name."""
        site.create("/api/v1/namespaces", {"metadata": {"name": "gpu-operator"}})
        own = "/api/v1/namespaces/gpu-operator/pods"
        reply = site.send("POST", f"{own}?dryRun=All", manifest(nodeName=HERE))
        assert (reply.status, reply.warnings) == (201, ())


def test_the_page_quotes_the_audit_events(site: Site, token: str) -> None:
    """Make one attempt of each kind. Other tests cover attempts of other processes."""
    waiting, here, other = f"{PODS}/{WAITING}", f"{GPUNODES}/{HERE}", f"{GPUNODES}/{OTHER}"
    node = f"/api/v1/nodes/{HERE}/status"
    strategic = "application/strategic-merge-patch+json"
    image = {"spec": {"containers": [{"name": "main", "image": "evil"}]}}
    for reply in (
        site.send("POST", PODS, manifest(annotations={"headroom.gpu/placement": "{}"})),
        site.send("PATCH", f"{PODS}/{BOUND}", noted("headroom.gpu/vram", "16Gi")),
        bind(site, WAITING, ADMIN_TOKEN, {"headroom.gpu/vram": "x"}),
        site.send("PATCH", waiting, image, token, strategic),
        site.send("PATCH", waiting, {"metadata": {"labels": {"app": "x"}}}, token),
        site.send("PATCH", waiting, noted("team/note", "x"), token),
        site.send("PATCH", f"{waiting}/status", {"status": {"phase": "Failed"}}, token),
        site.send("PATCH", node, {"status": {"capacity": {"nvidia.com/gpu": "64"}}}, token),
        site.send("POST", GPUNODES, {**GPUNODE, "metadata": {"name": "of-mine"}, "spec": {}}),
        site.send("PATCH", here, {"spec": {"initialised": False}}),
        site.send("PATCH", f"{other}/status", {"status": {}}, site.token(AGENT, HERE)),
    ):
        documented(reply)
