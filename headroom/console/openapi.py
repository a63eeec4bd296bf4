"""Adds descriptions of errors and of common fields to the OpenAPI document."""

from typing import Any

from fastapi import FastAPI

from headroom.console.view import View
from headroom.runtime.server.problem_details import PROBLEM_JSON


class ProblemBody(View):
    """Why a request failed."""

    type: str
    """Kind of problem, for programs. Example: urn:headroom:problem:not-found."""
    title: str
    """Kind of problem in words."""
    status: int
    detail: str
    """The mistake, its place, and a correct example."""


def describe_answers(app: FastAPI) -> None:
    """Describe errors and common fields in the OpenAPI document of the application."""
    without_problems = app.openapi

    def with_problems() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _with_problems(without_problems())
        return app.openapi_schema

    app.openapi = with_problems  # type: ignore[method-assign]


def _with_problems(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the OpenAPI document with problem details added to all error answers."""
    components = schema.setdefault("components", {}).setdefault("schemas", {})
    components["ProblemBody"] = ProblemBody.model_json_schema()
    _describe_fields(components)
    for unused in ("HTTPValidationError", "ValidationError"):
        components.pop(unused, None)
    problem_content = {PROBLEM_JSON: {"schema": {"$ref": "#/components/schemas/ProblemBody"}}}
    for path in schema["paths"].values():
        for operation in path.values():
            answers = operation["responses"]
            answers.setdefault("500", {"description": "Internal error; the log has the details"})
            for status, answer in answers.items():
                if int(status) >= 400 and "text/plain" not in answer.get("content", {}):
                    answer["content"] = problem_content
    return schema


#: Descriptions of fields that mean the same in all models. A docstring in a model has precedence.
_COMMON = {
    "node": "Name of the node.",
    "uid": "UID of the pod.",
    "owner_kind": "Kind of the pods' owner, such as Deployment.",
    "owner_name": "Name of the pods' owner.",
    "container": "Name of the container.",
    "priority": "Priority of the pod.",
    "device": "UUID of the device.",
    "uuid": "UUID of the device.",
    "model": "Product name of the device.",
    "resource": "Extended resource of the device, such as nvidia.com/gpu.",
    "replica": "Name of the replica.",
    "decision_id": "Id of the decision: UID.RESOURCEVERSION of the pod.",
    "at": "Time (RFC 3339).",
    "took_ms": "Duration of the call.",
    "message": "A sentence for people.",
    "sentence": "A sentence for people.",
    "unanswered": "Extenders that send nothing at present; their newest decisions are missing.",
    "used_bytes": "Measured use.",
    "allocatable_bytes": "Memory that can be reserved: total minus driver and node reserve.",
    "driver_reserve_bytes": "Memory that the driver reserves for itself.",
    "node_reserve_bytes": "Memory that the node's annotation headroom.gpu/reserve keeps free.",
    "pods_reserved_bytes": "Charge of pods whose device is known: the larger of request and use.",
    "pods_unconfirmed_bytes": "Worst-case charge of pods that no report shows yet.",
    "reserved_total_bytes": "Sum of pods_reserved and pods_unconfirmed, as top shows it.",
    "unattributed_bytes": "Use by no known pod, above the tolerance.",
    "headroom_bytes": "Memory that more pods can reserve.",
    "replicas_free": "Replicas that no pod holds.",
    "waiting_pods": "Pods that wait for a GPU.",
    "waiting_bytes": "GPU memory that the waiting pods request.",
    "report_age_s": "Age of the node's newest report or heartbeat.",
    "idle_since": "When the pod last used an SM (RFC 3339).",
    "idle_s": "Time without use of an SM.",
}


def _describe_fields(schemas: dict[str, Any]) -> None:
    """Add a description from ``_COMMON`` to each field that has no docstring."""
    for schema in schemas.values():
        for field, described in schema.get("properties", {}).items():
            # A list with this name has another meaning.
            of_list = described.get("type") == "array" and field != "unanswered"
            if field in _COMMON and not of_list and "$ref" not in described:
                described.setdefault("description", _COMMON[field])
