"""The list of shipped policies and webhooks, for ``headroom doctor --multi-tenant``."""

import json
from typing import Any

import yaml

from headroom.doctor.shipped_policies import FILE, decisive, decisive_webhook
from reference.markdown import ROOT

PATH = ROOT / "headroom/doctor" / FILE
_FOLDERS = ("deploy/base", "deploy/components/device-taints")


def text() -> str:
    policies: dict[str, Any] = {}
    webhooks: dict[str, Any] = {}
    for folder in _FOLDERS:
        for path in (ROOT / folder).glob("*.yaml"):
            for each in yaml.load_all(path.read_text(encoding="utf-8"), yaml.CSafeLoader):
                if each.get("kind") == "ValidatingAdmissionPolicy":
                    policies[each["metadata"]["name"]] = decisive(each["spec"])
                elif each.get("kind") == "MutatingWebhookConfiguration":
                    webhooks |= {one["name"]: decisive_webhook(one) for one in each["webhooks"]}
    return json.dumps({"policies": policies, "webhooks": webhooks}, indent=1, sort_keys=True) + "\n"
