"""Converts pods with Headroom's annotation to DRA claims and back, and counts their bytes
independently.

The count shares no code with the conversion. The bytes of a pod follow Kubernetes' rule for the
requests of init containers and sidecars (KEP-753), and the bytes of a claim are its count times its
memory.
"""

import copy
import random
from typing import Any

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from headroom.commands import app
from headroom.convert.dra_claims import from_claims, to_claims
from headroom.convert.manifests import Options, convert

GIB = 1 << 30
VRAM, GPU = "headroom.gpu/vram", "nvidia.com/gpu"
UNITS = {"Gi": 1 << 30, "Mi": 1 << 20, "": 1}
Object = dict[str, Any]


def amount_bytes(text: str) -> int:
    unit = text.lstrip("0123456789")
    return int(text.removesuffix(unit)) * UNITS[unit]


def counted_bytes(pod: Object) -> int:
    """Return the maximum number of bytes that the pod's containers hold at the same time."""
    by_name: dict[str, str] = {}
    text = pod["metadata"].get("annotations", {}).get(VRAM, "")
    if "=" in text:
        by_name = dict(part.split("=") for part in text.split(","))

    def held_bytes(container: Object) -> int:
        count = container.get("resources", {}).get("limits", {}).get(GPU, 0)
        return int(count * amount_bytes(by_name.get(container["name"], text))) if count else 0

    sidecars_bytes = most_bytes = 0
    for container in pod["spec"].get("initContainers", ()):
        if container.get("restartPolicy") == "Always":
            sidecars_bytes += held_bytes(container)
        else:
            most_bytes = max(most_bytes, sidecars_bytes + held_bytes(container))
    return max(most_bytes, sidecars_bytes + sum(map(held_bytes, pod["spec"]["containers"])))


def claimed_bytes(template: Object) -> int:
    return sum(
        request["exactly"]["count"]
        * amount_bytes(request["exactly"]["capacity"]["requests"]["memory"])
        for request in template["spec"]["spec"]["devices"]["requests"]
    )


def random_pod(rng: random.Random) -> Object:
    """Return a pod with up to three app containers, sidecars and init containers."""
    amounts: dict[str, str] = {}

    def container(name: str, chance: float) -> Object:
        if rng.random() > chance:
            return {"name": name}
        amounts[name] = rng.choice(
            [f"{rng.randint(1, 40)}Gi", f"{rng.randint(1, 40_000)}Mi", str(rng.randint(1, 1 << 36))]
        )
        return {"name": name, "resources": {"limits": {GPU: rng.choice([1, 1, 1, 2, 8])}}}

    containers = [container(f"app-{i}", 0.8) for i in range(rng.randint(1, 3))]
    initial = [container(f"init-{i}", 0.5) for i in range(rng.choice([0, 0, 1, 2]))]
    for each in initial:
        if rng.random() < 0.3:
            each["restartPolicy"] = "Always"
    spec: Object = {"containers": containers}
    if initial:
        spec["initContainers"] = initial
    if len(set(amounts.values())) == 1:
        text = next(iter(amounts.values()))
    else:
        text = ",".join(f"{name}={amount}" for name, amount in amounts.items())
    metadata = {"name": "p"} | ({"annotations": {VRAM: text}} if amounts else {})
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def test_a_thousand_random_pods_count_the_same_bytes_as_their_claims() -> None:
    rng = random.Random(31)
    converted = without_gpu = refused = 0
    while converted < 1000:
        pod = random_pod(rng)
        before = copy.deepcopy(pod)
        template, findings = to_claims(pod, "Pod p", "p", "")
        if template is None:
            assert pod == before
            # A claim can express every pod except one with an init container that needs more than
            # each later container.
            assert [finding.message[:50] for finding in findings] in (
                [],
                ["not changed: a claim is held for the whole life of"],
            )
            assert bool(findings) == bool(counted_bytes(before))
            without_gpu, refused = without_gpu + (not findings), refused + bool(findings)
            continue
        converted += 1
        assert findings == []
        assert counted_bytes(before) == claimed_bytes(template) > 0
        assert GPU not in str(pod)
        assert VRAM not in str(pod)
        used, findings = from_claims(pod, "Pod p", {"p-gpu": template})
        assert used == {"p-gpu"}
        several = [name for name, count in map(gpus, containers(pod)) if count > 1]
        assert [f.message.split(":")[0].split()[1] for f in findings] == several
        assert counted_bytes(pod) == counted_bytes(before)
        assert [gpus(each) for each in containers(pod)] == [
            gpus(each) for each in containers(before)
        ]
    assert (without_gpu, refused) == (86, 146)


def containers(pod: Object) -> list[Object]:
    return [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]


def gpus(container: Object) -> tuple[str, int]:
    return container["name"], container.get("resources", {}).get("limits", {}).get(GPU, 0)


DEPLOYMENT = """\
# The team's model.
apiVersion: apps/v1
kind: Deployment
metadata: {name: llm, namespace: team-a}
spec:
  template:
    metadata:
      annotations:
        headroom.gpu/vram: main=8Gi,side=2Gi  # measured
        headroom.gpu/max-sm: 50%
    spec:
      containers:
      - name: main
        resources:
          limits: {nvidia.com/gpu: 1, cpu: 1}
      - name: side
        resources:
          limits:
            nvidia.com/gpu: 2
---
kind: Pod
metadata: {name: plain}
spec:
  containers: [{name: main}]
"""


def command(text: str, *args: str) -> Result:
    return CliRunner().invoke(app, ["convert", *args, "-f", "-"], input=text)


def test_a_file_of_manifests_is_converted_to_claims_and_back() -> None:
    there = command(DEPLOYMENT, "--to", "dra")
    assert there.exit_code == 1
    assert there.stderr == (
        "<stdin>:10: Deployment llm: lost: headroom.gpu/max-sm: claims have no equivalent\n"
    )
    template, deployment, plain = yaml.safe_load_all(there.stdout)
    assert (template["apiVersion"], template["kind"]) == (
        "resource.k8s.io/v1",
        "ResourceClaimTemplate",
    )
    assert template["metadata"] == {"name": "llm-gpu", "namespace": "team-a"}
    devices = template["spec"]["spec"]["devices"]
    assert devices["requests"] == [
        {
            "name": name,
            "exactly": {
                "deviceClassName": "gpu.nvidia.com",
                "allocationMode": "ExactCount",
                "count": count,
                "capacity": {"requests": {"memory": memory}},
            },
        }
        for name, count, memory in [("main", 1, "8Gi"), ("side", 2, "2Gi")]
    ]
    assert devices["constraints"] == [
        {"requests": ["side"], "distinctAttribute": "gpu.nvidia.com/uuid"}
    ]
    spec = deployment["spec"]["template"]["spec"]
    assert spec["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": "llm-gpu"}]
    assert [each["resources"] for each in spec["containers"]] == [
        {"limits": {"cpu": 1}, "claims": [{"name": "gpu", "request": "main"}]},
        {"claims": [{"name": "gpu", "request": "side"}]},
    ]
    assert plain == {
        "kind": "Pod",
        "metadata": {"name": "plain"},
        "spec": {"containers": [{"name": "main"}]},
    }

    back = command(there.stdout)
    assert back.exit_code == 0
    assert [line.partition(": ")[2] for line in back.stderr.splitlines()] == [
        "Deployment llm: changed: container side: 2 devices; if GPUs are shared, the container can "
        "get two replicas of one device",
        "ResourceClaimTemplate llm-gpu: changed: removed, because no pod in the file uses it any "
        "more",
    ]
    assert back.stdout.startswith("# The team's model.\n")
    before = list(yaml.safe_load_all(DEPLOYMENT))
    del before[0]["spec"]["template"]["metadata"]["annotations"]["headroom.gpu/max-sm"]
    assert list(yaml.safe_load_all(back.stdout)) == before


def test_a_template_in_a_list_that_another_pod_still_needs_stays() -> None:
    claim = {"name": "g", "resourceClaimTemplateName": "t"}
    use = {"claims": [{"name": "g"}]}
    fits = {"containers": [{"name": "a", "resources": use}], "resourceClaims": [claim]}
    shares = copy.deepcopy(fits)
    shares["containers"].append({"name": "b", "resources": use})
    template = {
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": "t"},
        "spec": {"spec": {"devices": {"requests": [request("r")]}}},
    }
    items = [template, pod("one", fits), pod("two", shares)]
    result = convert(yaml.safe_dump({"kind": "List", "items": items}), Options())
    kept, one, two = yaml.safe_load(result.text)["items"]
    assert kept == template
    assert counted_bytes(one) == 4 * GIB
    assert two == pod("two", shares)
    assert "containers a and b use request r together" in result.findings[0].message
    del items[2]
    result = convert(yaml.safe_dump({"kind": "List", "items": items}), Options())
    assert [item["kind"] for item in yaml.safe_load(result.text)["items"]] == ["Pod"]


def pod(name: str, spec: Object) -> Object:
    return {"kind": "Pod", "metadata": {"name": name}, "spec": copy.deepcopy(spec)}


def request(name: str, **more: Any) -> Object:
    exactly = {"deviceClassName": "gpu.nvidia.com", "capacity": {"requests": {"memory": "4Gi"}}}
    return {"name": name, "exactly": exactly | more}


def annotated(text: str | None, **resources: Any) -> Object:
    annotations = {} if text is None else {VRAM: text}
    main = {"name": "main", "resources": {"limits": resources or {GPU: 1}}}
    return {"metadata": {"annotations": annotations}, "spec": {"containers": [main]}}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        pytest.param(
            annotated("25%"), "container main requests 25%; claims count bytes", id="share"
        ),
        pytest.param(annotated(None), "container main requests 1 replica", id="no amount"),
        pytest.param(annotated("8GB"), "'8GB' is not valid", id="not a quantity"),
        pytest.param(
            annotated("8Gi", **{"nvidia.com/mig-1g.10gb": 1}),
            "requests nvidia.com/mig-1g.10gb; only nvidia.com/gpu is converted",
            id="MIG",
        ),
    ],
)
def test_pods_that_claims_cannot_express_are_not_changed(given: Object, says: str) -> None:
    before = copy.deepcopy(given)
    template, findings = to_claims(given, "Pod p", "p", "")
    assert template is None
    assert given == before
    assert says in findings[0].message


@pytest.mark.parametrize(
    ("devices", "says"),
    [
        pytest.param(
            {"requests": [request("r", allocationMode="All")]},
            "request r of claim g has allocationMode, which has no equivalent",
            id="all devices",
        ),
        pytest.param({"requests": [request("r", selectors=[])]}, "has selectors", id="a selector"),
        pytest.param(
            {"requests": [request("r", capacity={})]},
            "does not request memory alone",
            id="no memory request",
        ),
        pytest.param(
            {"requests": [request("r")], "constraints": [{"matchAttribute": "a/b"}]},
            "which Headroom cannot express",
            id="a constraint",
        ),
        pytest.param(
            {
                "requests": [request("r"), request("s")],
                "constraints": [
                    {"requests": ["r", "s"], "distinctAttribute": "gpu.nvidia.com/uuid"}
                ],
            },
            "which Headroom cannot express",
            id="different devices for different requests",
        ),
        pytest.param(
            {
                "requests": [request("r", count=2)],
                "constraints": [{"requests": ["r"], "distinctAttribute": "gpu.nvidia.com/numa"}],
            },
            "which Headroom cannot express",
            id="devices on different NUMA nodes",
        ),
        pytest.param(
            {"requests": [{"name": "m", "exactly": {"deviceClassName": "mig.nvidia.com"}}]},
            "another class than gpu.nvidia.com",
            id="MIG",
        ),
        pytest.param(
            {
                "requests": [
                    {"name": "a", "firstAvailable": [{"deviceClassName": "gpu.nvidia.com"}]}
                ]
            },
            "request a of claim g has firstAvailable, which Headroom cannot express",
            id="alternatives",
        ),
        pytest.param({"requests": [request("r"), request("s", count=2)]}, "", id="two requests"),
        pytest.param(
            {"requests": 5}, "ResourceClaimTemplate 't' is not valid", id="invalid template"
        ),
        pytest.param(
            {"requests": [{"name": "n", "exactly": {"deviceClassName": "nic"}}]},
            None,
            id="a network card",
        ),
    ],
)
def test_claims_that_the_annotation_cannot_express_are_reported(
    devices: Object, says: str | None
) -> None:
    template = {"spec": {"spec": {"devices": devices}}}
    claim = {"name": "g", "resourceClaimTemplateName": "t"}
    main = {"name": "main", "resources": {"claims": [{"name": "g"}]}}
    given = {"metadata": {}, "spec": {"containers": [main], "resourceClaims": [claim]}}
    before = copy.deepcopy(given)
    used, findings = from_claims(given, "Pod p", {"t": template})
    if says == "":
        assert (used, counted_bytes(given)) == ({"t"}, 12 * GIB)
        return
    assert used == set()
    assert given == before
    assert (not findings) if says is None else says in findings[0].message


def test_a_claim_used_only_by_an_init_container_counts_less_and_that_is_reported() -> None:
    template = {"spec": {"spec": {"devices": {"requests": [request("a"), request("b")]}}}}
    given = {
        "metadata": {},
        "spec": {
            "initContainers": [
                {"name": "a", "resources": {"claims": [{"name": "g", "request": "a"}]}}
            ],
            "containers": [{"name": "b", "resources": {"claims": [{"name": "g", "request": "b"}]}}],
            "resourceClaims": [{"name": "g", "resourceClaimTemplateName": "t"}],
        },
    }
    used, findings = from_claims(given, "Pod p", {"t": template})
    assert used == {"t"}
    assert counted_bytes(given) == 4 * GIB
    assert "counts 4.0 GiB instead of 8.0 GiB" in findings[0].message


def test_a_claim_without_its_template_in_the_file_stays_unchanged() -> None:
    claim = {"name": "g", "resourceClaimTemplateName": "t"}
    given = {"metadata": {}, "spec": {"containers": [{"name": "a"}], "resourceClaims": [claim]}}
    used, findings = from_claims(given, "Pod p", {})
    assert used == set()
    assert "ResourceClaimTemplate 't' of claim g is not in the file; add it" in findings[0].message
