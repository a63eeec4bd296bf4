"""Decodes AdmissionReviews of version admission.k8s.io/v1, decides about them and encodes the
responses.

Only the fields in ``contract.kube`` are decoded from the object under review. A body that no API
server sends raises ``MalformedReview``, which names the invalid part.
"""

import base64
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import msgspec

from headroom.contract.kube import KubeStruct, ObjectMeta, OwnerReference, Pod, PodSpec
from headroom.contract.pod_limits import MAX_CONTAINERS, container_count, sized
from headroom.contract.printable import printable
from headroom.contract.unread_annotations import MAX_WARNINGS
from headroom.core.recommend.pod_programs import programs_of
from headroom.core.recommend.programs import Program
from headroom.webhook.automatic import requests_auto
from headroom.webhook.context import AdmissionContext
from headroom.webhook.mutation import Mutated, mutate, mutate_template
from headroom.webhook.validation import (
    Validated,
    validate_annotations,
    validate_oversized,
    validate_pod,
    validate_template,
)

API_VERSION = "admission.k8s.io/v1"
KIND = "AdmissionReview"
_NODE_USER = "system:node:"
#: Maximum number of characters of a warning. An API server truncates longer warnings, and drops
#: further warnings after a total of about 4 KiB.
_MAX_WARNING_CHARS = 256
#: Maximum number of characters of the reason for a rejection.
_MAX_REJECTION_CHARS = 1024
#: Returns the inputs of a decision about a pod of the given namespace.
ContextOf = Callable[[str], AdmissionContext]

#: Label that names the Kueue queue in which an object waits.
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_CREATE, _UPDATE = "CREATE", "UPDATE"
#: Kinds that are changed when they are created.
_CHANGED = ("Pod", "Job")
#: Kinds whose own annotations are validated.
_ANNOTATED = ("Namespace", "Node")


class MalformedReview(ValueError):
    """A review that cannot be answered. The message names the error and the invalid part."""


class GroupVersionKind(KubeStruct, frozen=True):
    group: str = ""
    version: str = ""
    kind: str = ""


class UserInfo(KubeStruct, frozen=True):
    username: str = ""
    groups: tuple[str, ...] = ()

    @property
    def node(self) -> str:
        """The node of the kubelet that sent the request. Empty for any other client."""
        node = self.username.removeprefix(_NODE_USER)
        is_node = self.username.startswith(_NODE_USER) and "system:nodes" in self.groups
        return node if is_node else ""


class Request(KubeStruct, frozen=True):
    uid: str
    kind: GroupVersionKind
    operation: str = ""
    namespace: str = ""
    user_info: UserInfo = UserInfo()
    #: ``object`` is null when an object is deleted, ``old_object`` when it is created.
    object: msgspec.Raw = msgspec.Raw(b"null")
    old_object: msgspec.Raw = msgspec.Raw(b"null")


class _Review(KubeStruct, frozen=True):
    api_version: str
    kind: str
    request: Request


class _Template(KubeStruct, frozen=True):
    metadata: ObjectMeta = ObjectMeta()
    spec: PodSpec = PodSpec()


class _Job(KubeStruct, frozen=True):
    template: _Template = _Template()


class _JobTemplate(KubeStruct, frozen=True):
    metadata: ObjectMeta = ObjectMeta()
    spec: _Job = _Job()


class _WorkloadSpec(KubeStruct, frozen=True):
    template: _Template | None = None
    job_template: _JobTemplate | None = None


class _Workload(KubeStruct, frozen=True):
    metadata: ObjectMeta = ObjectMeta()
    spec: _WorkloadSpec = _WorkloadSpec()


class _Annotated(KubeStruct, frozen=True):
    metadata: ObjectMeta = ObjectMeta()


def read(body: bytes) -> Request:
    """Decode the request of a review.

    Raises ``MalformedReview``. This includes an empty uid, because the API server needs the uid in
    the response.
    """
    review: _Review = _decoded(body, _Review, "the body")
    if (review.api_version, review.kind) != (API_VERSION, KIND):
        raise MalformedReview(
            f"{review.kind!r:.80} of {review.api_version!r:.80} is not supported; "
            f"send {KIND} of {API_VERSION}"
        )
    if not review.request.uid:
        raise MalformedReview("request.uid is empty")
    return review.request


def pod_of(request: Request) -> Pod:
    pod = _decoded(request.object, Pod, "request.object")
    return _in_namespace(sized(pod, len(request.object)), request)


def _oversized(pod: Pod, context: AdmissionContext) -> Validated | None:
    """Return the result for a pod with more containers than a GPU pod may have, or None for any
    other pod.

    This must be checked first, because all other checks read all containers several times.
    """
    if container_count(pod) <= MAX_CONTAINERS or context.is_static(pod):
        return None
    return validate_oversized(pod, context)


def pod_before(request: Request) -> Pod | None:
    before = _decoded(request.old_object, Pod | None, "request.oldObject")
    return None if before is None else _in_namespace(before, request)


def template_of(request: Request) -> tuple[list[ObjectMeta], Pod] | None:
    """Return the metadata of a workload and of the Jobs of a CronJob, and a pod that is built from
    the pod template. Return None if there is no template."""
    workload = _decoded(request.object, _Workload, "request.object")
    nested = workload.spec.job_template
    template = workload.spec.template if nested is None else nested.spec.template
    if template is None:
        return None
    pod = Pod(metadata=template.metadata, spec=template.spec)
    owners = [workload.metadata, *([] if nested is None else [nested.metadata])]
    return owners, _in_namespace(pod, request)


def metadata_of(request: Request) -> tuple[ObjectMeta, ObjectMeta | None]:
    """Return the metadata of the object, and of its old version if it is changed."""
    annotated: _Annotated = _decoded(request.object, _Annotated, "request.object")
    before: _Annotated | None = _decoded(request.old_object, _Annotated | None, "request.oldObject")
    return annotated.metadata, None if before is None else before.metadata


def answer_mutated(request: Request, mutated: Mutated) -> bytes:
    patch: dict[str, Any] = {}
    if mutated.operations:
        operations = msgspec.json.encode([each.wire for each in mutated.operations])
        patch = {"patchType": "JSONPatch", "patch": base64.b64encode(operations).decode()}
    return _answer(request, {"allowed": True, **patch}, mutated.warnings)


def answer_validated(request: Request, validated: Validated) -> bytes:
    response: dict[str, Any] = {"allowed": not validated.rejection}
    if validated.rejection:
        # This is the status that the API server itself uses for invalid fields.
        response["status"] = {
            "message": f"Headroom: {printable(validated.rejection)[:_MAX_REJECTION_CHARS]}",
            "reason": "Invalid",
            "code": 422,
        }
    return _answer(request, response, validated.warnings)


def _answer(request: Request, response: dict[str, Any], warnings: Iterable[str]) -> bytes:
    texts = [_truncated(f"Headroom: {printable(each)}") for each in warnings][:MAX_WARNINGS]
    if texts:
        response["warnings"] = texts
    review = {"apiVersion": API_VERSION, "kind": KIND, "response": {"uid": request.uid, **response}}
    return msgspec.json.encode(review)


def _truncated(text: str) -> str:
    return text if len(text) <= _MAX_WARNING_CHARS else text[: _MAX_WARNING_CHARS - 3] + "..."


def _in_namespace(pod: Pod, request: Request) -> Pod:
    """Set the pod's namespace from the request, because a pod that is being created may lack it."""
    metadata = msgspec.structs.replace(pod.metadata, namespace=request.namespace)
    return msgspec.structs.replace(pod, metadata=metadata)


def _decoded(body: bytes | msgspec.Raw, kind: Any, where: str) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except (ValueError, RecursionError) as err:  # msgspec raises UnicodeDecodeError too
        raise MalformedReview(f"{where} cannot be read: {str(err)[:300]}") from err


def answer_mutate(request: Request, context_of: ContextOf) -> bytes:
    """Answer a mutating review. Only pods and the templates of Jobs are changed, and only when they
    are created."""
    if request.operation != _CREATE or request.kind.kind not in _CHANGED:
        return answer_mutated(request, Mutated())
    if request.kind.kind == "Job":
        template = _queued_template(request)
        changes = (
            Mutated()
            if template is None
            else mutate_template(template, _context(request, context_of))
        )
        return answer_mutated(request, changes)
    pod, context = pod_of(request), _context(request, context_of)
    if (oversized := _oversized(pod, context)) is not None:
        return answer_validated(request, oversized)
    if requests_auto(pod):
        programs, generate_name = _programs(request)
        context = replace(context, programs=programs, generate_name=generate_name)
    changed = mutate(pod, context)
    # The mutating webhook has failurePolicy Fail and the validating webhook does not, so invalid
    # pods are already rejected here.
    validated = validate_pod(changed.pod or pod, None, context)
    if validated.rejection:
        return answer_validated(request, Validated(validated.rejection, changed.warnings))
    return answer_mutated(request, changed)


def _queued_template(request: Request) -> Pod | None:
    """Return a pod that is built from the template of a Job in a Kueue queue, or None if the Job
    names no queue.

    The Job is set as the pod's controller, so that its profile can be found.
    """
    found = template_of(request)
    if found is None or not (found[0][0].labels or {}).get(QUEUE_LABEL):
        return None
    (job,), pod = found
    owners = job.owner_references or [OwnerReference(kind="Job", name=job.name, controller=True)]
    metadata = msgspec.structs.replace(pod.metadata, owner_references=owners)
    return msgspec.structs.replace(pod, metadata=metadata)


def _programs(request: Request) -> tuple[dict[str, Program], str]:
    try:
        return programs_of(request.object)
    except (ValueError, RecursionError) as err:
        raise MalformedReview(f"request.object cannot be read: {str(err)[:300]}") from err


def answer_validate(request: Request, context_of: ContextOf) -> bytes:
    """Answer a validating review."""
    return answer_validated(request, _validated(request, context_of))


def _validated(request: Request, context_of: ContextOf) -> Validated:
    kind = request.kind.kind
    if request.operation not in (_CREATE, _UPDATE):
        return Validated()
    if kind in _ANNOTATED:
        return validate_annotations(kind, *metadata_of(request), context_of(request.namespace))
    context = _context(request, context_of)
    if kind == "Pod":
        pod = pod_of(request)
        oversized = _oversized(pod, context) if request.operation == _CREATE else None
        return oversized or validate_pod(pod, pod_before(request), context)
    found = template_of(request)
    return Validated() if found is None else validate_template(kind, *found, context)


def _context(request: Request, context_of: ContextOf) -> AdmissionContext:
    return replace(context_of(request.namespace), kubelet_node=request.user_info.node)
