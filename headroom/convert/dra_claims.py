"""Converts one pod template between annotation headroom.gpu/vram and a claim of DRA.

With DRA (dynamic resource allocation), a ResourceClaimTemplate has one request for each GPU
container, and kube-scheduler counts its capacity ``memory`` on each device. Both directions keep
the total bytes of a pod: the sum over its containers of the amount times the number of devices.

A claim is held for the whole life of a pod. So an ordinary init container uses the request of a
container that starts later, and reserves nothing of its own.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy

import msgspec

from headroom.contract.annotations import (
    USER_ANNOTATIONS,
    VRAM,
    VRAM_FROM,
    VRAM_REQUESTED,
    Bytes,
    VramAnnotation,
    render_vram,
)
from headroom.contract.kube import Pod
from headroom.contract.quantity import gib
from headroom.convert.allocators import GPU, BadValue
from headroom.convert.claim_template import (
    MAX_REQUESTS,
    MEMORY,
    Request,
    requests_of,
    template_with,
)
from headroom.convert.findings import Finding, Outcome, several_devices
from headroom.convert.pod_template import Yaml, line_of, mapping
from headroom.core.placement.policy import Rules
from headroom.core.placement.request import Ask, ContainerAsk, Unreadable, understand

#: Name of the claim within the pod.
CLAIM = "gpu"


def to_claims(
    pod: Yaml, where: str, name: str, namespace: str
) -> tuple[Yaml | None, list[Finding]]:
    """Replace the pod's GPU resources and annotation by a claim. ``name`` is the workload's name.

    Return the ResourceClaimTemplate that the pod needs, or None if it was not changed, and findings
    for the user.
    """
    try:
        containers, asks = _asks(pod)
        if not containers:
            return None, []
        if not name:
            raise BadValue("it has no name, from which to derive the name of the template")
        requests, uses = _requests(pod, containers)
        _check_equal(asks, requests)
        if any(claim.get("name") == CLAIM for claim in _claims(pod)):
            raise BadValue(f"it already has a claim named {CLAIM}; rename that claim")
    except BadValue as err:
        return None, [_not_changed(pod, where, err)]
    findings = list(_remove_annotations(pod, where))
    template_name = f"{name[:249].rstrip('-.')}-gpu"
    for container, _ in _containers(pod):
        _replace_resources(container, uses)
    claim = {"name": CLAIM, "resourceClaimTemplateName": template_name}
    pod["spec"]["resourceClaims"] = [*_claims(pod), claim]
    return template_with(template_name, namespace, requests.values()), findings


def from_claims(
    pod: Yaml, where: str, templates: Mapping[str, Yaml]
) -> tuple[set[str], list[Finding]]:
    """Replace the pod's claims of GPUs by GPU resources and the annotation.

    ``templates`` are the ResourceClaimTemplates of the file, by name. Return the names of the
    templates that were replaced, or none if the pod was not changed, and findings for the user.
    """
    requests: dict[tuple[str, str], Request] = {}
    used: set[str] = set()
    try:
        for claim in _claims(pod):
            name = str(claim.get("name"))
            found = requests_of(name, claim, templates)
            requests |= {(name, request.name): request for request in found}
            if found:
                used.add(str(claim["resourceClaimTemplateName"]))
        if not requests:
            return set(), []
        _check_alone(pod)
        asked = _asked(pod, requests)
        _write_resources(trial := deepcopy(pod), requests, asked)
        _, asks = _asks(trial)
    except BadValue as err:
        return set(), [_not_changed(pod, where, err)]
    _write_resources(pod, requests, asked)
    line = line_of(pod, "spec")
    findings = [
        Finding(Outcome.CHANGED, line, where, several_devices(name, request.count))
        for name, request in asked.items()
        if request.count > 1
    ]
    counted_bytes = _most_bytes(asks)
    claimed_bytes = sum(request.total_bytes for request in requests.values())
    if counted_bytes != claimed_bytes:
        message = (
            f"counts {gib(counted_bytes)} instead of {gib(claimed_bytes)}: containers that start "
            "after an init container reuse its memory"
        )
        findings.append(Finding(Outcome.CHANGED, line, where, message))
    return used, findings


def _not_changed(pod: Yaml, where: str, err: BadValue) -> Finding:
    return Finding(Outcome.NOT_UNDERSTOOD, line_of(pod, "spec"), where, f"not changed: {err}")


# To claims.


def _asks(pod: Yaml) -> tuple[tuple[ContainerAsk, ...], tuple[Ask, ...]]:
    """Return the GPU containers as the extender reads them, and the pod's asks. Raises ``BadValue``
    if claims cannot express them."""
    metadata = {"annotations": (pod.get("metadata") or {}).get("annotations") or {}}
    raw = json.dumps({"metadata": metadata, "spec": pod["spec"]}, default=str)
    try:
        request = understand(msgspec.json.decode(raw, type=Pod), None, Rules())
    except msgspec.ValidationError as err:
        raise BadValue(str(err)) from err
    if isinstance(request, Unreadable):
        raise BadValue(request.message)
    for ask in request.containers:
        if ask.resource != GPU:
            raise BadValue(f"container {ask.name} requests {ask.resource}; only {GPU} is converted")
        if not isinstance(ask.amount, Bytes):
            raise BadValue(
                f"container {ask.name} requests {ask.amount_text}; claims count bytes. "
                f"Example: {VRAM}: 8Gi"
            )
    return request.containers, request.asks


def _requests(
    pod: Yaml, containers: Iterable[ContainerAsk]
) -> tuple[dict[str, Request], dict[str, str]]:
    """Return the requests of the claim by name, and the name of each container's request."""
    initial = {
        str(each["name"])
        for each in pod["spec"].get("initContainers") or ()
        if each.get("restartPolicy") != "Always"
    }
    requests: dict[str, Request] = {}
    uses: dict[str, str] = {}
    # Go from the last to the first, because an init container uses a later container's request.
    for ask in reversed(list(containers)):
        assert isinstance(ask.amount, Bytes)
        amount_bytes = ask.amount.count_bytes
        shared = None
        if ask.name in initial:
            shared = _shareable(requests.values(), ask.count, amount_bytes)
        if shared is None:
            requests[ask.name] = Request(ask.name, ask.count, amount_bytes)
        else:
            shared.memory_bytes = max(shared.memory_bytes, amount_bytes)
        uses[ask.name] = ask.name if shared is None else shared.name
    if len(requests) > MAX_REQUESTS:
        raise BadValue(f"it has {len(requests)} GPU containers; a claim has at most {MAX_REQUESTS}")
    return dict(reversed(requests.items())), uses


def _shareable(requests: Iterable[Request], count: int, amount_bytes: int) -> Request | None:
    """Return the smallest request with this count that is large enough. If there is none, return
    the largest request, or None if there are no requests."""
    equal = [each for each in requests if each.count == count]
    enough = [each for each in equal if each.memory_bytes >= amount_bytes]
    if enough:
        return min(enough, key=lambda each: each.memory_bytes)
    return max(equal, key=lambda each: each.memory_bytes, default=None)


def _check_equal(asks: Iterable[Ask], requests: Mapping[str, Request]) -> None:
    """Raise ``BadValue`` if the claim would not count the same bytes as the pod."""
    counted_bytes = _most_bytes(asks)
    claimed_bytes = sum(each.total_bytes for each in requests.values())
    if claimed_bytes != counted_bytes:
        raise BadValue(
            f"a claim is held for the whole life of a pod and would count {gib(claimed_bytes)} "
            f"instead of {gib(counted_bytes)}, because an init container requests more than each "
            "container that starts after it. Give it the amount of one of them"
        )


def _most_bytes(asks: Iterable[Ask]) -> int:
    """Return the most bytes that the pod holds at a time, summed over its devices."""
    return sum(
        max(
            sum(
                portion.count * portion.amount.count_bytes
                for portion in phase
                if isinstance(portion.amount, Bytes)
            )
            for phase in ask.phases
        )
        for ask in asks
    )


def _remove_annotations(pod: Yaml, where: str) -> Iterator[Finding]:
    """Remove Headroom's annotations, and yield a finding for each without an equivalent."""
    annotations = (pod.get("metadata") or {}).get("annotations") or {}
    for key in [key for key in annotations if key in USER_ANNOTATIONS]:
        if key not in (VRAM, VRAM_FROM, VRAM_REQUESTED):
            message = f"{key}: claims have no equivalent"
            yield Finding(Outcome.LOST, line_of(annotations, key), where, message)
        del annotations[key]
    if not annotations and "annotations" in (pod.get("metadata") or {}):
        del pod["metadata"]["annotations"]


def _replace_resources(container: Yaml, uses: Mapping[str, str]) -> None:
    """Replace the GPUs of a container by the request that the container uses."""
    resources = container.get("resources") or {}
    for part in ("limits", "requests"):
        asked = resources.get(part) or {}
        if GPU in asked:
            del asked[GPU]
            if not asked:
                del resources[part]
    if (request := uses.get(str(container["name"]))) is not None:
        claims = mapping(container, "resources").setdefault("claims", [])
        claims.append({"name": CLAIM, "request": request})


# From claims.


def _asked(pod: Yaml, requests: Mapping[tuple[str, str], Request]) -> dict[str, Request]:
    """Return the devices and the memory of each container, by the container's name. Raises
    ``BadValue`` if an annotation cannot express them."""
    asked: dict[str, Request] = {}
    #: The container that uses a request and was visited last. The last container is visited first.
    later: dict[tuple[str, str], str] = {}
    for container, lasts in reversed([*_containers(pod)]):
        name = str(container["name"])
        keys = [
            key
            for use in (container.get("resources") or {}).get("claims") or ()
            for key in requests
            if key[0] == use.get("name") and use.get("request", key[1]) == key[1]
        ]
        own = [requests[key] for key in keys]
        if len({each.memory_bytes for each in own}) > 1:
            raise BadValue(f"container {name} uses requests with different amounts of {MEMORY}")
        if own:
            asked[name] = Request(name, sum(each.count for each in own), own[0].memory_bytes)
        for key in keys:
            if lasts and key in later:
                raise BadValue(f"containers {name} and {later[key]} use request {key[1]} together")
            later[key] = name
    asked = dict(reversed(asked.items()))
    if unused := sorted(set(requests) - set(later)):
        raise BadValue(f"no container uses request {unused[0][1]} of claim {unused[0][0]}")
    return asked


def _check_alone(pod: Yaml) -> None:
    """Raise ``BadValue`` if the pod also requests GPUs of the device plugin."""
    annotations = (pod.get("metadata") or {}).get("annotations") or {}
    resources = [each.get("resources") or {} for each, _ in _containers(pod)]
    if VRAM in annotations or any(
        GPU in (each.get(part) or {}) for each in resources for part in ("limits", "requests")
    ):
        raise BadValue(f"it has a claim for a GPU beside {GPU} or annotation {VRAM}")


def _containers(pod: Yaml) -> Iterator[tuple[Yaml, bool]]:
    """Yield the containers in their order, and for each container whether it still runs when later
    containers run.
    """
    for container in pod["spec"].get("initContainers") or ():
        yield container, container.get("restartPolicy") == "Always"
    for container in pod["spec"]["containers"]:
        yield container, True


def _write_resources(
    pod: Yaml, requests: Iterable[tuple[str, str]], asked: Mapping[str, Request]
) -> None:
    """Replace claims and their uses by GPUs and the annotation."""
    spec = pod["spec"]
    gpu_claims = {name for name, _ in requests}
    for container, _ in _containers(pod):
        resources = container.get("resources") or {}
        kept = [use for use in resources.get("claims") or () if use.get("name") not in gpu_claims]
        if kept:
            resources["claims"] = kept
        elif "claims" in resources:
            del resources["claims"]
        if (request := asked.get(str(container["name"]))) is not None:
            mapping(mapping(container, "resources"), "limits")[GPU] = request.count
    kept_claims = [claim for claim in _claims(pod) if claim.get("name") not in gpu_claims]
    if kept_claims:
        spec["resourceClaims"] = kept_claims
    else:
        del spec["resourceClaims"]
    amounts = {name: Bytes(request.memory_bytes) for name, request in asked.items()}
    vram = VramAnnotation(by_container=amounts)
    if len(set(amounts.values())) == 1:
        vram = VramAnnotation(everywhere=next(iter(amounts.values())))
    mapping(mapping(pod, "metadata"), "annotations")[VRAM] = render_vram(vram)


def _claims(pod: Yaml) -> list[Yaml]:
    return list(pod["spec"].get("resourceClaims") or ())
