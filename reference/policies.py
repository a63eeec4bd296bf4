"""The list of shipped admission policies, which ``headroom doctor --multi-tenant`` compares."""

import json

import yaml

from extender.doctor.shipped_policies import FILE, decisive
from reference.markdown import ROOT

PATH = ROOT / "extender/doctor" / FILE
_FOLDERS = ("deploy/base", "deploy/components/device-taints")


def text() -> str:
    found = {}
    for folder in _FOLDERS:
        for path in (ROOT / folder).glob("*.yaml"):
            for each in yaml.load_all(path.read_text(encoding="utf-8"), yaml.CSafeLoader):
                if each.get("kind") == "ValidatingAdmissionPolicy":
                    found[each["metadata"]["name"]] = decisive(each["spec"])
    return json.dumps(found, indent=1, sort_keys=True) + "\n"
