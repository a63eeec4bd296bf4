"""Helpers of the mutation tests: variables of a container, and the annotations that they follow."""

from typing import Any


def env_of(obj: dict[str, Any], name: str = "main") -> dict[str, Any]:
    """Return each variable's value, or the annotation that it follows."""
    spec = obj["spec"]
    found = [c for c in [*(spec.get("initContainers") or ()), *spec["containers"]]]
    (one,) = (c for c in found if c["name"] == name)
    return {
        each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"]
        if "valueFrom" in each
        else each["value"]
        for each in one.get("env") or ()
    }


def follows(annotation: str) -> str:
    return f"metadata.annotations['headroom.gpu/{annotation}']"
