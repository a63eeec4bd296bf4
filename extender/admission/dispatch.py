"""Chooses the decision that answers a review, by the kind of the object under review."""

from collections.abc import Callable
from dataclasses import replace

from extender.admission.context import AdmissionContext
from extender.admission.mutation import Mutated, mutate
from extender.admission.review import (
    Request,
    answer_mutated,
    answer_validated,
    metadata_of,
    pod_before,
    pod_of,
    template_of,
)
from extender.admission.validation import (
    Validated,
    validate_annotations,
    validate_pod,
    validate_template,
)

#: Returns the inputs of a decision about a pod of the given namespace.
Environment = Callable[[str], AdmissionContext]

_CREATE, _UPDATE = "CREATE", "UPDATE"
#: Kinds whose own annotations are validated.
_ANNOTATED = ("Namespace", "Node")


def answer_mutate(request: Request, around: Environment) -> bytes:
    """Answer a mutating review. Only pods that are being created are changed."""
    if request.kind.kind != "Pod" or request.operation != _CREATE:
        return answer_mutated(request, Mutated())
    return answer_mutated(request, mutate(pod_of(request), _around(request, around)))


def answer_validate(request: Request, around: Environment) -> bytes:
    """Answer a validating review."""
    return answer_validated(request, _validated(request, around))


def _validated(request: Request, around: Environment) -> Validated:
    kind = request.kind.kind
    if request.operation not in (_CREATE, _UPDATE):
        return Validated()
    if kind == "Pod":
        return validate_pod(pod_of(request), pod_before(request), _around(request, around))
    if kind in _ANNOTATED:
        return validate_annotations(kind, metadata_of(request))
    found = template_of(request)
    if found is None:
        return Validated()
    owner, pod = found
    return validate_template(kind, owner, pod, around(request.namespace))


def _around(request: Request, around: Environment) -> AdmissionContext:
    return replace(around(request.namespace), by_node=request.user_info.node)
