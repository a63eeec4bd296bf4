"""Installs the kinds of other projects that Headroom's manifests use, from the modules that define
them.
"""

from pathlib import Path

from tests.controlplane import ControlPlane
from tests.deploy import go_modules
from tests.gobin.build import MODULES
from tests.waiting import until

#: The folder whose go.mod pins cert-manager, the Go module, and the module's folder of
#: CustomResourceDefinitions.
CERT_MANAGER = (
    MODULES / "cert-manager-controller",
    "github.com/cert-manager/cert-manager",
    "deploy/crds",
)
PROMETHEUS_OPERATOR = (
    Path(__file__).parent / "crds",
    "github.com/prometheus-operator/prometheus-operator",
    "example/prometheus-operator-crd",
)
#: Maps each foreign kind in Headroom's manifests to the name of its CustomResourceDefinition.
KINDS = {
    "ServiceMonitor": "servicemonitors.monitoring.coreos.com",
    "PodMonitor": "podmonitors.monitoring.coreos.com",
    "PrometheusRule": "prometheusrules.monitoring.coreos.com",
    "Certificate": "certificates.cert-manager.io",
    "Issuer": "issuers.cert-manager.io",
}


def text(pinned_in: Path, module: str, folder: str) -> str:
    """Return all definitions as YAML. Remove the template lines that only a chart can render."""
    files = sorted((go_modules.folder(pinned_in, module) / folder).glob("*.yaml"))
    assert files
    lines = [line for file in files for line in ["---", *file.read_text().splitlines()]]
    return "\n".join(line for line in lines if "{{" not in line)


def install(plane: ControlPlane, *more: str) -> None:
    """Create ``KINDS`` and ``more`` of the same projects, and wait until they are served."""
    names = (*KINDS.values(), *more)
    documents = [
        document
        for project in (CERT_MANAGER, PROMETHEUS_OPERATOR)
        for document in text(*project).split("\n---\n")
        if any(f"\n  name: {name}\n" in document for name in names)
    ]
    assert len(documents) == len(names)
    file = plane.folder / "foreign.yaml"
    file.write_text("\n---\n".join(documents))
    # Apply on the server, because the annotation of a client-side apply has a maximum length.
    plane.kubectl("apply", "--server-side", f"--filename={file}")
    for name in names:
        until(lambda name=name: is_served(plane, name), f"{name} is served")


def is_served(plane: ControlPlane, definition: str) -> bool:
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{definition}"
    conditions = plane.call("GET", path).get("status", {}).get("conditions") or ()
    return any(each["type"] == "Established" and each["status"] == "True" for each in conditions)
