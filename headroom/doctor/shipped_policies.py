"""Compares the admission policies and webhooks of a cluster with the shipped manifests.

``make docs`` writes ``policies.json``, which has the decisive parts of the policies and webhooks in
deploy/.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

Spec = Mapping[str, Any]
FILE = "policies.json"
#: Headroom's namespace in deploy/. The chart replaces it wherever it occurs, and so does
#: ``rewritten``.
NAMESPACE = "headroom-system"


def decisive(spec: Spec) -> dict[str, Any]:
    """Return the parts of a policy's spec that affect its decisions, without the defaults that the
    API server adds."""
    constraints = spec.get("matchConstraints") or {}
    return {
        "failurePolicy": spec.get("failurePolicy", "Fail"),
        "paramKind": spec.get("paramKind"),
        "matchConstraints": {
            "matchPolicy": constraints.get("matchPolicy", "Equivalent"),
            "namespaceSelector": constraints.get("namespaceSelector") or {},
            "objectSelector": constraints.get("objectSelector") or {},
            "resourceRules": _rules(constraints.get("resourceRules")),
            "excludeResourceRules": _rules(constraints.get("excludeResourceRules")),
        },
        "matchConditions": _expressions(spec.get("matchConditions")),
        "variables": _expressions(spec.get("variables")),
        "validations": [_on_one_line(each) for each in spec.get("validations") or ()],
    }


def decisive_webhook(webhook: Spec) -> dict[str, Any]:
    """Return the parts of a webhook that decide whether it is called, and on which server."""
    client = webhook.get("clientConfig") or {}
    service = client.get("service") or {}
    return {
        "failurePolicy": webhook.get("failurePolicy", "Fail"),
        "matchPolicy": webhook.get("matchPolicy", "Equivalent"),
        "namespaceSelector": webhook.get("namespaceSelector") or {},
        "objectSelector": webhook.get("objectSelector") or {},
        "rules": _rules(webhook.get("rules")),
        "matchConditions": _expressions(webhook.get("matchConditions")),
        "clientConfig": {"port": 443, "url": client.get("url"), **service},
    }


def _rules(rules: Any) -> list[dict[str, Any]]:
    named = ("apiGroups", "apiVersions", "resources", "operations", "resourceNames")
    return [
        {"scope": each.get("scope", "*")} | {name: sorted(each.get(name) or ()) for name in named}
        for each in rules or ()
    ]


def _expressions(named: Any) -> dict[str, str]:
    return {each["name"]: _on_one_line(each) for each in named or ()}


def _on_one_line(each: Mapping[str, Any]) -> str:
    """Return an expression without line breaks, which kustomize and Helm change."""
    return " ".join(str(each["expression"]).split())


def rewritten(name: str, spec: Spec, namespace: str) -> list[str]:
    """Return the parts in which a policy differs from the shipped policy of that name. The list is
    empty if Headroom ships no such policy.

    ``namespace`` is Headroom's own namespace.
    """
    shipped = _shipped(namespace)["policies"].get(name)
    found = decisive(spec)
    return [] if shipped is None else [part for part in found if found[part] != shipped[part]]


def rewritten_webhook(webhook: Spec, namespace: str) -> list[str]:
    """Return the parts in which a mutating webhook differs from the shipped one of that name."""
    shipped, found = _shipped(namespace)["webhooks"][webhook["name"]], decisive_webhook(webhook)
    return [part for part in found if found[part] != shipped[part]]


@cache
def _shipped(namespace: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the shipped "policies" and "webhooks", each by name."""
    text = files(__package__).joinpath(FILE).read_text(encoding="utf-8")
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(text.replace(NAMESPACE, namespace))
    return found
