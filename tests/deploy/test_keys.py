"""Checks that each component has its own private key, that no other component mounts this key, and
that clients expect the component's name.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from headroom.certs.cluster_secrets import AUTHORITIES, wanted
from headroom.certs.pki import Usage
from tests.deploy.rendered import (
    DEPLOY,
    NAMESPACE,
    Objects,
    objects,
    pod_specs,
    template,
    with_components,
)

WANTED = {each.secret: each for each in wanted(NAMESPACE)}
MONITORED = ("ServiceMonitor", "PodMonitor")
#: Values with which the chart renders these components.
VALUES = {"monitors": {"enabled": True}, "deviceTaints": {"enabled": True}}


@pytest.fixture(scope="module", params=["kustomize", "chart"])
def rendered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Objects:
    if request.param == "chart":
        return objects(template(tmp_path_factory.mktemp("home"), VALUES))
    folder = tmp_path_factory.mktemp("overlay")
    return objects(with_components(folder, ("monitors", "device-taints")))


def mounted_keys(spec: dict[str, Any]) -> Iterator[str]:
    """Yield the Secrets whose private keys a pod mounts."""
    for volume in spec.get("volumes", ()):
        sources = volume.get("projected", {}).get("sources", [volume])
        for source in (each["secret"] for each in sources if "secret" in each):
            name = source.get("secretName") or source["name"]
            items = [item["key"] for item in source.get("items", ())]
            if name != "headroom-prometheus" and (not items or "tls.key" in items):
                yield name


def test_no_two_components_mount_the_same_key_and_no_pod_mounts_the_key_of_a_ca(
    rendered: Objects,
) -> None:
    keys = {key[2]: sorted(mounted_keys(spec)) for key, spec in pod_specs(rendered).items()}
    mounted = [name for names in keys.values() for name in names]
    assert sorted(mounted) == sorted(WANTED)
    assert keys["headroom-scheduler"] == ["headroom-extender-tls", "headroom-scheduler-client"]
    for part in ("console", "webhook", "recorder", "device-taints"):
        assert keys[f"headroom-{part}"] == [f"headroom-{part}-tls"]


def test_the_containers_of_the_scheduler_do_not_mount_each_others_keys(
    rendered: Objects,
) -> None:
    spec = rendered["Deployment", NAMESPACE, "headroom-scheduler"]["spec"]["template"]["spec"]
    for container, key in (
        ("extender", "headroom-extender-tls"),
        ("kube-scheduler", "headroom-scheduler-client"),
    ):
        (found,) = (each for each in spec["containers"] if each["name"] == container)
        names = {mount["name"] for mount in found["volumeMounts"]}
        volumes = [each for each in spec["volumes"] if each["name"] in names]
        assert list(mounted_keys({"volumes": volumes})) == [key]


def test_the_jobs_refer_to_the_secrets_that_they_write(rendered: Objects) -> None:
    every = sorted([AUTHORITIES, *WANTED])
    for name, may_write in (("headroom-certs", every), ("headroom-certs-renewal", sorted(WANTED))):
        rules = rendered["Role", NAMESPACE, name]["rules"]
        written = [rule for rule in rules if "patch" in rule["verbs"]]
        assert [sorted(rule["resourceNames"]) for rule in written] == [may_write]
    policy = rendered["ValidatingAdmissionPolicy", "", "headroom-certs"]["spec"]
    (validation,) = policy["validations"]
    assert all(f'"{name}"' in validation["expression"] for name in every)


def test_prometheus_expects_the_certificate_of_each_component(rendered: Objects) -> None:
    monitors = [each for key, each in rendered.items() if key[0] in MONITORED]
    assert monitors
    for monitor in monitors:
        spec = monitor["spec"]
        part = spec["selector"]["matchLabels"]["app.kubernetes.io/component"]
        for endpoint in spec.get("endpoints") or spec["podMetricsEndpoints"]:
            if endpoint.get("scheme") == "https":
                secret = endpoint["tlsConfig"]["ca"]["secret"]
                assert secret == {"name": f"headroom-{part}-tls", "key": "ca.crt"}
                assert endpoint["tlsConfig"]["serverName"] in WANTED[secret["name"]].names


def test_no_name_is_in_the_certificates_of_two_components() -> None:
    names = [name for each in WANTED.values() for name in each.names]
    assert len(names) == len(set(names))


def test_cert_manager_issues_equivalent_certificates() -> None:
    file = DEPLOY / "components/cert-manager/certificates.yaml"
    certificates = {
        each["spec"]["secretName"]: each["spec"]
        for each in yaml.safe_load_all(file.read_text())
        if each["kind"] == "Certificate" and not each["spec"].get("isCA")
    }
    assert certificates.keys() == WANTED.keys()
    issuers: dict[Usage, set[str]] = {}
    for name, each in WANTED.items():
        found = certificates[name]
        assert sorted(found.get("dnsNames", ())) == sorted(each.names)
        assert f"{each.usage.value} auth" in found["usages"]
        issuers.setdefault(each.usage, set()).add(found["issuerRef"]["name"])
    assert [len(each) for each in issuers.values()] == [1, 1]
    assert issuers[Usage.SERVER] != issuers[Usage.CLIENT]
