"""CPU time that Headroom's admission policies cost the API server, for pods at its limits.

    python -m benchmarks.policies [--each] [--shape SHAPE ...] [--request REQUEST ...]

A real API server gets pods without a GPU that are as large as it takes, in one respect each. Each
request is a dry run, first without Headroom, then with all admission policies and the conditions of
all webhooks (or with each of them alone: ``--each``). The CPU time is that of the API server's
process. The goal: no request costs more than 1.1 times as much.
"""

import argparse
import itertools
import json
import statistics
import string
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import urllib3

from benchmarks.vitals import vitals
from tests.admission.server import start_webhook
from tests.admission.site import ADMISSION, MERGE, SYSTEM, manifests, webhooks
from tests.certificates import Authority
from tests.controlplane import ADMIN_TOKEN, ControlPlane, control_plane
from tests.waiting import until

Object = dict[str, Any]
PODS = "/api/v1/namespaces/default/pods"
EXTENDER = f"system:serviceaccount:{SYSTEM}:headroom-extender"
KUBELET = "system:node:n1"
#: Most that a request may cost, relative to the same request without Headroom.
GOAL_RATIO = 1.1
#: CPU time in seconds that is measured for each number, at least; the clock ticks in 10 ms.
MEASURED_S = 1.0
LEAST_REQUESTS, MOST_REQUESTS = 3, 30


def names(count: int) -> Iterator[str]:
    """Yield distinct short names that are valid as keys of annotations and names of resources."""
    letters = string.ascii_letters + string.digits
    for length in itertools.count(1):
        for each in itertools.product(letters, repeat=length):
            yield "".join(each)
            count -= 1
            if not count:
                return


def pod(annotations: int = 0, containers: int = 1, resources: int = 0, prefix: str = "") -> Object:
    amounts = {f"a.b/{name}": "1" for name in names(resources)} if resources else {}
    first = {"name": "c", "image": "i", "resources": {"limits": amounts, "requests": amounts}}
    others = [{"name": f"c{index}", "image": "i"} for index in range(containers - 1)]
    notes = {f"{prefix}{name}": "" for name in names(annotations)} if annotations else {}
    return {
        "metadata": {"name": "at-rest", "annotations": notes},
        "spec": {"nodeName": "n1", "containers": [first, *others]},
    }


#: Name -> a pod that is at a limit of the API server: 256 KiB of annotations, 1.5 MiB in etcd.
SHAPES: dict[str, Callable[[], Object]] = {
    "30,000 annotations": lambda: pod(annotations=30_000),
    "84,000 annotations": lambda: pod(annotations=84_000),
    "16,000 annotations headroom.gpu/*": lambda: pod(annotations=16_000, prefix="headroom.gpu/"),
    "8,000 containers": lambda: pod(containers=8_000),
    "30,000 resources": lambda: pod(resources=30_000),
}
REQUESTS = ("create", "user's update", "kubelet's status", "kube-scheduler's status")
#: Without the largest: it takes a minute alone.
USUAL = [name for name in SHAPES if not name.startswith("84,000")]


@dataclass(frozen=True, slots=True)
class Api:
    plane: ControlPlane
    http: urllib3.PoolManager

    def send(self, method: str, path: str, body: Object, user: str = "") -> tuple[int, str]:
        """Send as this user with all rights; return status and message."""
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
        """Return the CPU time of one request: the median of several."""
        pid = self.plane.pid("kube-apiserver")
        spent: list[float] = []
        while len(spent) < LEAST_REQUESTS or (
            sum(spent) < MEASURED_S and len(spent) < MOST_REQUESTS
        ):
            before_s = vitals(pid).cpu_s
            status, message = request()
            spent.append(vitals(pid).cpu_s - before_s)
            if status == 504:  # the API server gave up
                return spent[-1]
            if status >= 300 and status != 403:  # Headroom's scheduler does not write such pods
                raise SystemExit(f"rejected with {status}: {message[:300]}")
        return (
            statistics.median(spent) if statistics.median(spent) > 0.1 else statistics.fmean(spent)
        )


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
    for each in [*manifests("base/admission.yaml"), *webhooks(server.url, authority)]:
        kind, name = each["kind"], each["metadata"]["name"]
        plural = f"{kind.lower()[:-1]}ies" if kind.endswith("Policy") else f"{kind.lower()}s"
        own = f"{kind}" if "Webhook" in kind else name
        found.setdefault(own, []).append((f"{ADMISSION}/{plural}", each))
    return found


def apply(api: Api, objects: list[tuple[str, Object]]) -> None:
    for path, each in objects:
        assert api.send("POST", path, each)[0] == 201


def remove(api: Api, objects: list[tuple[str, Object]]) -> None:
    for path, each in objects:
        api.send("DELETE", f"{path}/{each['metadata']['name']}", {})


def probe(api: Api) -> bool:
    """Return whether the policies are in force: the API server learns of them a moment later."""
    annotations = {"headroom.gpu/placement": "x"}
    obj = {"metadata": {"name": "probe", "annotations": annotations}, "spec": pod()["spec"]}
    return api.send("POST", f"{PODS}?dryRun=All", obj)[0] == 403


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
        settings = list(parts.items()) if options.each else [("all", everything)]
        for shape in options.shape or USUAL:
            obj = SHAPES[shape]()
            status, message = api.send("POST", PODS, obj)
            assert status == 201, message
            wanted = options.request or REQUESTS
            sent = {what: send for what, send in requests(api, obj).items() if what in wanted}
            without = {what: api.cpu_s(request) for what, request in sent.items()}
            for name, objects in settings:
                apply(api, objects)
                if name in ("all", "headroom-pod-annotations"):
                    until(lambda: probe(api), "the policies are in force")
                for what, request in sent.items():
                    cost_s = api.cpu_s(request)
                    ratio = cost_s / without[what]
                    worst = max(worst, ratio)
                    sys.stdout.write(
                        f"{shape:36} {what:24} {name:30} {without[what]:6.2f} s -> {cost_s:6.2f} s"
                        f"  {ratio:5.2f}\n"
                    )
                    sys.stdout.flush()
                remove(api, objects)
            api.send("DELETE", f"{PODS}/at-rest", {"gracePeriodSeconds": 0})
    sys.stdout.write(f"worst ratio {worst:.2f}, goal {GOAL_RATIO}\n")
    return int(worst > GOAL_RATIO)


if __name__ == "__main__":
    sys.exit(main())
