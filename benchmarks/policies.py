"""Measures the CPU time that Headroom's admission policies cost the API server.

    python -m benchmarks.policies [--each] [--shape SHAPE ...] [--request REQUEST ...]

A real API server gets pods without a GPU: an ordinary pod, and pods that reach one of the API
server's limits each. Each request is a dry run. It is sent in turns without Headroom and with all
admission policies and the conditions of all webhooks, or with each of them alone (``--each``). The
CPU time of the API server's process is measured. The goal is that no request costs more than 1.1
times as much with Headroom.

``one look`` is the minimum cost of any product that treats some pods differently: a policy and the
conditions of two webhooks, of which one examines each container once. An API server that is older
than 1.37 converts the pod for each policy and webhook, even if the expression is ``true``.
"""

import argparse
import itertools
import json
import string
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import urllib3

from benchmarks.vitals import vitals
from tests.admission.server import start_webhook
from tests.admission.site import ADMISSION, MERGE, SYSTEM, manifests, webhooks
from tests.certificates import Authority
from tests.controlplane import ADMIN_TOKEN, ControlPlane, control_plane

Object = dict[str, Any]
PODS = "/api/v1/namespaces/default/pods"
EXTENDER = f"system:serviceaccount:{SYSTEM}:headroom-extender"
KUBELET = "system:node:n1"
#: The goal for the cost of a request, relative to the same request without Headroom.
GOAL_RATIO = 1.1
ONE_LOOK = "one look"
#: The API server notices new and deleted policies within a second.
PROPAGATED_S = 2.0
#: Each turn measures at least this much CPU time in seconds, because the clock ticks in 10 ms.
MEASURED_S = 0.5
LEAST_REQUESTS, MOST_REQUESTS = 3, 300
#: Turns without and with the policies alternate, because other load on the machine changes.
TURNS = 3


def names(count: int) -> Iterator[str]:
    """Yield distinct short names that are valid as keys of annotations and names of resources."""
    letters = string.ascii_letters + string.digits
    for length in itertools.count(1):
        for each in itertools.product(letters, repeat=length):
            yield "".join(each)
            count -= 1
            if not count:
                return


LIMITS = {"limits": {"cpu": "1", "memory": "1Gi"}}


def pod(
    annotations: int = 0,
    containers: int = 1,
    resources: int = 0,
    prefix: str = "",
    limits: bool = False,
) -> Object:
    amounts = {f"a.b/{name}": "1" for name in names(resources)} if resources else {}
    first = {"name": "c", "image": "i", "resources": {"limits": amounts, "requests": amounts}}
    own = {"resources": LIMITS} if limits else {}
    others = [{"name": f"c{index}", "image": "i", **own} for index in range(containers - 1)]
    notes = {f"{prefix}{name}": "" for name in names(annotations)} if annotations else {}
    return {
        "metadata": {"name": "at-rest", "annotations": notes},
        "spec": {"nodeName": "n1", "containers": [first, *others]},
    }


#: Name -> a function that returns an ordinary pod, or one at a limit of the API server: 256 KiB of
#: annotations, or 1.5 MiB in etcd.
SHAPES: dict[str, Callable[[], Object]] = {
    "2 containers": lambda: pod(annotations=3, containers=2, limits=True),
    "64 containers with limits": lambda: pod(containers=64, limits=True),
    "30,000 annotations": lambda: pod(annotations=30_000),
    "84,000 annotations": lambda: pod(annotations=84_000),
    "16,000 annotations headroom.gpu/*": lambda: pod(annotations=16_000, prefix="headroom.gpu/"),
    "8,000 containers": lambda: pod(containers=8_000),
    "4,000 containers with limits": lambda: pod(containers=4_000, limits=True),
    "30,000 resources": lambda: pod(resources=30_000),
}
REQUESTS = ("create", "user's update", "kubelet's status", "kube-scheduler's status")
#: All shapes except the largest, which takes a minute alone.
USUAL = [name for name in SHAPES if not name.startswith("84,000")]


@dataclass(frozen=True, slots=True)
class Api:
    plane: ControlPlane
    http: urllib3.PoolManager

    def send(self, method: str, path: str, body: Object, user: str = "") -> tuple[int, str]:
        """Send a request as this user with all rights; return its status and message."""
        headers = urllib3.HTTPHeaderDict(
            {
                "Authorization": f"Bearer {ADMIN_TOKEN}",
                "Content-Type": MERGE if method == "PATCH" else "application/json",
            }
        )
        if user:
            headers.add("Impersonate-User", user)
            for group in ("system:masters", "system:nodes"):
                headers.add("Impersonate-Group", group)
        text = json.dumps(body)
        url = self.plane.url + path
        answer = self.http.request(method, url, body=text, headers=headers, timeout=120.0)
        content = json.loads(answer.data)
        return answer.status, content.get("message", "") if answer.status >= 300 else ""

    def cpu_s(self, request: Callable[[], tuple[int, str]]) -> float:
        """Return the mean CPU time of one request, measured over several."""
        pid = self.plane.pid("kube-apiserver")
        count, began_s, spent_s = 0, vitals(pid).cpu_s, 0.0
        while count < LEAST_REQUESTS or (spent_s < MEASURED_S and count < MOST_REQUESTS):
            status, message = request()
            count, spent_s = count + 1, vitals(pid).cpu_s - began_s
            # 403 is expected, because Headroom's scheduler does not write such pods. With 504 the
            # API server gave up.
            if status >= 300 and status not in (403, 504):
                raise SystemExit(f"rejected with {status}: {message[:300]}")
        return spent_s / count


def requests(api: Api, obj: Object) -> dict[str, Callable[[], tuple[int, str]]]:
    path, dry = f"{PODS}/{obj['metadata']['name']}", "?dryRun=All"
    new = {**obj, "metadata": {**obj["metadata"], "name": "new"}}
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    note = {"metadata": {"labels": {"team/note": "x"}}}
    status = {"status": {"message": "x"}}
    return {
        REQUESTS[0]: lambda: api.send("POST", f"{PODS}{dry}", new),
        REQUESTS[1]: lambda: api.send("PATCH", f"{path}{dry}", note),
        REQUESTS[2]: lambda: api.send("PATCH", f"{path}/status{dry}", status, KUBELET),
        REQUESTS[3]: lambda: api.send(
            "PATCH", f"{path}/status{dry}", {"status": {"conditions": [condition]}}, EXTENDER
        ),
    }


def installed(plane: ControlPlane) -> dict[str, list[tuple[str, Object]]]:
    """Start a webhook, and return name -> paths and objects that belong together: a policy with its
    binding, or a configuration of webhooks."""
    authority = Authority(plane.folder, "ca")
    server = start_webhook(plane, "webhook", authority, plane.kubeconfig())
    found: dict[str, list[tuple[str, Object]]] = {}
    files = ("admission.yaml", "tenants.yaml", "priorityclass.yaml")
    shipped = [each for file in files for each in manifests(f"base/{file}")]
    for each in [*shipped, *webhooks(server.url, authority)]:
        if each["kind"] == "PriorityClass":
            continue
        kind, name = each["kind"], each["metadata"]["name"]
        plural = f"{kind.lower()[:-1]}ies" if kind.endswith("Policy") else f"{kind.lower()}s"
        own = f"{kind}" if "Webhook" in kind else name
        found.setdefault(own, []).append((f"{ADMISSION}/{plural}", each))
    return found


def one_look() -> list[tuple[str, Object]]:
    """Return a policy and two webhooks that match no pod without a GPU, and change nothing else."""
    pods = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"]}
    written = {**pods, "resources": ["pods", "pods/status"]}
    policy = {
        "metadata": {"name": "one-look"},
        "spec": {
            "matchConstraints": {"resourceRules": [written]},
            "validations": [{"expression": "true"}],
        },
    }
    binding = {
        "metadata": {"name": "one-look"},
        "spec": {"policyName": "one-look", "validationActions": ["Deny"]},
    }
    found = [
        (f"{ADMISSION}/validatingadmissionpolicies", policy),
        (f"{ADMISSION}/validatingadmissionpolicybindings", binding),
    ]
    looks = 'true in object.spec.containers.map(each, "a/b" in each.resources.?limits.orValue({}))'
    for kind, expression in (("mutating", looks), ("validating", "false")):
        webhook = {
            "name": "one-look.example.com",
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
            "clientConfig": {"url": "https://127.0.0.1:1/"},
            "rules": [{**pods, "operations": ["CREATE"], "resources": ["pods"]}],
            "matchConditions": [{"name": "looks", "expression": expression}],
        }
        path = f"{ADMISSION}/{kind}webhookconfigurations"
        found.append((path, {"metadata": {"name": "one-look"}, "webhooks": [webhook]}))
    return found


def apply(api: Api, objects: list[tuple[str, Object]]) -> None:
    for path, each in objects:
        assert api.send("POST", path, each)[0] == 201


def remove(api: Api, objects: list[tuple[str, Object]]) -> None:
    for path, each in objects:
        api.send("DELETE", f"{path}/{each['metadata']['name']}", {})


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--each", action="store_true", help="measure each policy and webhook alone")
    parser.add_argument("--shape", action="append", choices=list(SHAPES), help="pods to send")
    parser.add_argument("--request", action="append", choices=REQUESTS, help="requests to send")
    options = parser.parse_args()
    worst = 0.0
    with control_plane() as plane:
        api = Api(plane, urllib3.PoolManager(ca_certs=str(plane.ca_file), retries=False))
        parts = installed(plane)
        everything = [each for part in parts.values() for each in part]
        settings = [(ONE_LOOK, one_look())]
        settings += parts.items() if options.each else [("all of Headroom", everything)]
        for shape in options.shape or USUAL:
            obj = SHAPES[shape]()
            status, message = api.send("POST", PODS, obj)
            assert status == 201, message
            wanted = options.request or REQUESTS
            sent = {what: send for what, send in requests(api, obj).items() if what in wanted}
            for name, objects in settings:
                spent = {(what, part): 0.0 for what in sent for part in (False, True)}
                for is_installed in [False, True] * TURNS:
                    if is_installed:
                        apply(api, objects)
                        time.sleep(PROPAGATED_S)
                    for what, request in sent.items():
                        spent[what, is_installed] += api.cpu_s(request) / TURNS
                    if is_installed:
                        remove(api, objects)
                        time.sleep(PROPAGATED_S)
                for what in sent:
                    without_s, with_s = spent[what, False], spent[what, True]
                    ratio = with_s / without_s
                    worst = max(worst, ratio if name != ONE_LOOK else 0.0)
                    sys.stdout.write(
                        f"{shape:36} {what:24} {name:30} {without_s * 1e3:8.2f} ms ->"
                        f" {with_s * 1e3:8.2f} ms  {ratio:5.2f}\n"
                    )
                    sys.stdout.flush()
            api.send("DELETE", f"{PODS}/at-rest", {"gracePeriodSeconds": 0})
    sys.stdout.write(f"worst ratio {worst:.2f}, goal {GOAL_RATIO}\n")
    return int(worst > GOAL_RATIO)


if __name__ == "__main__":
    sys.exit(main())
