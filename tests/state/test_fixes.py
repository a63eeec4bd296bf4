"""Commands and YAML that carry out suggestions."""

import msgspec

from contract.kube import OwnerReference, Pod
from extender.state.fixes import request_memory, tolerate, uncordon
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


def test_other_pods_get_yaml() -> None:
    expected = 'metadata:\n  annotations:\n    headroom.gpu/vram: "6Gi"'
    assert request_memory(pod(), "6Gi") == expected
    assert request_memory(owned("Job", "train"), "6Gi") == expected


def test_taints_are_tolerated_with_their_key_and_effect() -> None:
    for taint in ("team=red:NoSchedule", "team:NoSchedule"):
        assert tolerate(taint) == (
            "spec:\n  tolerations:\n  - {key: team, operator: Exists, effect: NoSchedule}"
        )


def test_a_node_is_uncordoned() -> None:
    assert uncordon("gpu-a") == "kubectl uncordon gpu-a"
