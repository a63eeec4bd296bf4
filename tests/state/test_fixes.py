"""Tests the commands and YAML that carry out suggestions."""

import json
import shlex

import msgspec
import pytest

from headroom.console.facts.fixes import end_old_pods_first, request_memory, tolerate, uncordon
from headroom.contract.kube import OwnerReference, Pod
from headroom.core.cluster.idle_pods import owner_of
from tests.builders import pod


def owned(kind: str, name: str) -> Pod:
    of = pod(namespace="ml")
    owners = [OwnerReference("apps/v1", kind, name, controller=True)]
    metadata = msgspec.structs.replace(of.metadata, owner_references=owners)
    return msgspec.structs.replace(of, metadata=metadata)


def test_the_template_of_a_controller_that_rolls_out_is_patched() -> None:
    assert request_memory(owned("StatefulSet", "nb"), "6Gi") == (
        "kubectl -n ml patch statefulset nb --type merge -p "
        '\'{"spec": {"template": {"metadata": {"annotations": {"headroom.gpu/vram": "6Gi"}}}}}\''
    )


def test_pods_without_a_patchable_controller_get_yaml() -> None:
    expected = 'metadata:\n  annotations:\n    headroom.gpu/vram: "6Gi"'
    assert request_memory(pod(), "6Gi") == expected
    assert request_memory(owned("Job", "train"), "6Gi") == expected


@pytest.mark.parametrize(
    "name", ["web; id; #", "a\nid", "\x1b[2J", "$(id)", "-rf", "Web", "a b", "", "a..b", "a" * 254]
)
def test_an_owner_with_an_invalid_name_is_ignored(name: str) -> None:
    """The API server accepts any text as the name of an owner."""
    of = owned("Deployment", name)
    assert owner_of(of) == ("", "")
    assert end_old_pods_first(of) == ""
    assert request_memory(of, "6Gi") == request_memory(pod(), "6Gi")
    assert owner_of(owned("Deployment; id", "web")) == ("", "")
    assert owner_of(owned("Deployment", "web.v1-2")) == ("Deployment", "web.v1-2")


def test_the_namespace_in_a_command_is_quoted() -> None:
    of = owned("Deployment", "web")
    odd = msgspec.structs.replace(of.metadata, namespace="a; id")
    words = shlex.split(request_memory(msgspec.structs.replace(of, metadata=odd), "6Gi; id"))
    assert words[:6] == ["kubectl", "-n", "a; id", "patch", "deployment", "web"]
    assert json.loads(words[-1])["spec"]["template"]["metadata"]["annotations"] == {
        "headroom.gpu/vram": "6Gi; id"
    }


def test_taints_are_tolerated_with_their_key_and_effect() -> None:
    for taint in ("team=red:NoSchedule", "team:NoSchedule"):
        assert tolerate(taint) == (
            "spec:\n  tolerations:\n  - {key: team, operator: Exists, effect: NoSchedule}"
        )


def test_the_command_to_uncordon_a_node() -> None:
    assert uncordon("gpu-a") == "kubectl uncordon gpu-a"
