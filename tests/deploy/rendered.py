"""Renders deploy/ with kustomize and Helm, and returns the objects by kind, namespace and name."""

import functools
import json
import os
import pickle
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from headroom.runtime.settings.settings_files import merge_texts
from tests.controlplane import ROOT, built

DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "chart/headroom"
NAMESPACE = "headroom-system"
#: Maps the placeholder images in deploy/ to the images that the tests use.
IMAGES = {
    "set-me.invalid/headroom-extender:set-me": "registry.example/headroom-extender:0.1.0",
    "set-me.invalid/headroom-agent:set-me": "registry.example/headroom-agent:0.1.0",
    "set-me.invalid/kube-scheduler:set-me": "registry.example/kube-scheduler:v1.37.2",
}
IMAGE_VALUES = {
    "extender": {"repository": "registry.example/headroom-extender", "tag": "0.1.0"},
    "agent": {"repository": "registry.example/headroom-agent", "tag": "0.1.0"},
    "kubeScheduler": {"repository": "registry.example/kube-scheduler", "tag": "v1.37.2"},
}
#: Overlays. The chart has a values file with the name of each overlay.
PLATFORMS = (
    *("gpu-operator", "device-plugin", "k3s", "openshift"),
    *("gke", "eks", "aks", "trial"),
    "multi-tenant",
)
#: Maps each values file that has no overlay of its own to the overlay that it extends.
CHART_ONLY = {"kubeadm": "device-plugin"}
#: Maps each component in deploy/components to the values with which the chart has the same effect.
COMPONENTS: Mapping[str, Mapping[str, Any]] = {
    "privileged": {"agent": {"privileged": True}},
    "control-on-gpu-nodes": {"onGpuNodes": True},
    "no-ptrace": {"agent": {"ptrace": False}},
    "mig": {"agent": {"mig": True}},
    "selinux": {"agent": {"selinux": True}},
    "steering": {"agent": {"steering": {"permitted": True}}},
    "backoff-gate": {"kubeScheduler": {"backoffGate": True}},
    "monitors": {"monitors": {"enabled": True}},
    "open-metrics": {"openMetrics": True},
    "rules": {"rules": {"enabled": True}},
    "dashboard": {"dashboard": {"enabled": True}},
    "cert-manager": {"certManager": True},
    "deny-other-schedulers": {"denyOtherSchedulers": True},
    "in-tree-mirror": {"mirror": True},
    "device-taints": {"deviceTaints": {"enabled": True}},
    "openshift": {"securityContextConstraints": True},
    "webhook-host-network": {"webhook": {"hostNetwork": True}},
    "console-host-network": {"console": {"hostNetwork": True}},
    # The component keeps the Job that makes certificates. The chart always keeps it.
    "gitops": {},
}

#: Values that enable all options of the chart that work together.
EVERYTHING: dict[str, Any] = {
    "imagePullSecrets": ["registry-login"],
    "denyOtherSchedulers": True,
    "mirror": True,
    "deviceTaints": {"enabled": True, "replicas": 1},
    "securityContextConstraints": True,
    "settings": {"policy": "spread"},
    "scheduler": {
        "tolerations": [{"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}],
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
        ],
        "podAnnotations": {"example.com/a": "b"},
    },
    "extender": {"extraEnv": [{"name": "TZ", "value": "UTC"}]},
    "webhook": {"hostNetwork": True, "nodeSelector": {"a": "b"}},
    "console": {
        "hostNetwork": True,
        "podLabels": {"team": "ml"},
        "resources": {"limits": {"memory": "1Gi"}},
    },
    "agent": {
        "runtimeClassName": "nvidia",
        "mig": True,
        "selinux": True,
        "driverFolder": "/home/kubernetes/bin/nvidia",
        "steering": {"permitted": True, "byDefault": True},
        "pools": [{"name": "canary", "nodeLabel": {"key": "pool", "value": "canary"}}],
    },
    "monitors": {"enabled": True, "labels": {"release": "prom"}},
    "rules": {"enabled": True, "labels": {"release": "prom"}},
    "dashboard": {"enabled": True},
}
#: Values for the options that exclude an option in ``EVERYTHING``.
INSTEAD: dict[str, Any] = {
    "certManager": True,
    "defaultScheduler": {"enabled": True, "clusterIP": "10.0.0.53"},
    "monitors": {"enabled": True, "tokenSecret": "metrics-reader"},
    "agent": {"privileged": True},
}

#: Values with which the chart renders the same objects as the overlays. The overlays do not set the
#: back-off gate, because they do not depend on the version of kube-scheduler. A component sets it.
AS_OVERLAYS: dict[str, Any] = {"kubeScheduler": {"backoffGate": False}}

#: ``SERVING`` are the kinds whose pods always run. ``WORKLOADS`` adds the kinds whose pods run and
#: end.
SERVING = ("Deployment", "DaemonSet")
WORKLOADS = (*SERVING, "Job", "CronJob")

Key = tuple[str, str, str]
Objects = dict[Key, dict[str, Any]]


class Refused(Exception):
    """The command failed. The message is the output of the command."""


def run(command: Sequence[str | Path], home: Path) -> str:
    """Return the standard output of a command. The command does not see the machine's
    kubeconfig.
    """
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "KUBECONFIG": os.devnull}
    environment["GOGC"] = "off"  # The command ends before it uses much memory.
    done = subprocess.run(
        [str(part) for part in command],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Refused(done.stderr)
    return done.stdout


@functools.cache
def overlay(folder: Path) -> str:
    """Return the output of ``kubectl kustomize`` for a folder."""
    return run([built("kubectl")["kubectl"], "kustomize", folder], Path(os.devnull))


def with_components(folder: Path, components: Iterable[str]) -> str:
    """Write an overlay that adds these components to the device-plugin overlay into the empty
    ``folder``.
    """
    kustomization = {
        "resources": [os.path.relpath(DEPLOY / "overlays/device-plugin", folder)],
        "components": [os.path.relpath(DEPLOY / "components" / c, folder) for c in components],
    }
    (folder / "kustomization.yaml").write_text(json.dumps(kustomization))
    return run([built("kubectl")["kubectl"], "kustomize", folder], folder)


def helm(home: Path, *arguments: str | Path, values: Mapping[str, Any] | None = None) -> str:
    """Return the standard output of helm. ``values`` override all other values."""
    more: list[str | Path] = []
    if values is not None:
        (home / "values.json").write_text(json.dumps(values))
        more = ["--values", home / "values.json"]
    return run([built("helm")["helm"], *arguments, *more], home)


def template(
    home: Path,
    values: Mapping[str, Any],
    platform: str = "",
    namespace: str = NAMESPACE,
    flags: Sequence[str] = (),
) -> str:
    """Return the output of ``helm template`` with the tests' images, the values of a platform, and
    ``values``.
    """
    command: list[str | Path] = ["template", "headroom", CHART, "--namespace", namespace, *flags]
    if platform:
        command += ["--values", CHART / f"platforms/{platform}.yaml"]
    return helm(home, *command, values={"images": IMAGE_VALUES, **values})


def objects(text: str) -> Objects:
    """Return the objects by kind, namespace and name. Fail if an object occurs twice. The caller
    may change the objects, because they are copies.
    """
    found: Objects = pickle.loads(_pickled_objects(text))
    return found


@functools.lru_cache(maxsize=32)
def _pickled_objects(text: str) -> bytes:
    found: Objects = {}
    for each in yaml.load_all(
        text, Loader=yaml.CSafeLoader
    ):  # ten times as fast as the Python loader
        if each:
            metadata = each["metadata"]
            key = (each["kind"], metadata.get("namespace", ""), metadata["name"])
            assert key not in found, f"{key} is rendered twice"
            found[key] = each
    return pickle.dumps(found)


def named_images(text: str) -> str:
    """Replace the placeholder images with the tests' images, as ``images:`` in a user's overlay
    does.
    """
    for placeholder, image in IMAGES.items():
        text = text.replace(placeholder, image)
    return text


def settings_of(found: Objects) -> dict[str, Any]:
    """Return the merged settings from the ConfigMap that Headroom's processes mount."""
    return merge_texts(found["ConfigMap", NAMESPACE, "headroom-config"]["data"])


def pod_specs(found: Objects) -> dict[Key, dict[str, Any]]:
    """Return the pod templates of all objects that create pods."""
    specs = {key: each["spec"] for key, each in found.items() if key[0] in WORKLOADS}
    return {
        key: spec.get("jobTemplate", {"spec": spec})["spec"]["template"]["spec"]
        for key, spec in specs.items()
    }
