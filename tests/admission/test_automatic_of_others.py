"""Checks that a tenant cannot use ``auto`` to learn the measured use of another tenant's
workload.
"""

import json
from typing import Any

import pytest

from headroom.contract.kube import Namespace, ObjectMeta
from headroom.contract.watched import NamespaceSeen, ProfileSeen
from headroom.runtime.settings.settings import Settings
from headroom.webhook.process import Decider
from headroom.webhook.review import answer_mutate, read
from tests.admission.reviews import patch_of, review
from tests.admission.test_automatic import owned
from tests.console.test_recommendations import profile

OWNER, TENANT = "ml", "tenant"


@pytest.fixture
def decider() -> Decider:
    """Return a webhook that has listed a profile of Deployment llm in namespace ml."""
    found = Decider(Settings())
    found.apply(
        [NamespaceSeen(Namespace(metadata=ObjectMeta(name=name))) for name in (OWNER, TENANT)]
    )
    found.apply([ProfileSeen(known := profile())])
    assert known.metadata.namespace == OWNER
    return found


def shown(decider: Decider, of: str, **metadata: Any) -> str:
    """Return the complete answer of the webhook to a dry run of a pod in namespace ``of``."""
    pod = owned("auto")
    pod["metadata"] |= metadata
    asked = review(pod, namespace=of)
    asked["request"]["dryRun"] = True
    answer = json.loads(answer_mutate(read(json.dumps(asked).encode()), decider.context))
    return json.dumps([patch_of(answer["response"]), answer["response"].get("warnings")])


def test_the_owners_namespace_gets_the_recommendation(decider: Decider) -> None:
    assert "VRAMProfile deployment-llm" in shown(decider, OWNER)


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"namespace": OWNER},
        {"namespace": OWNER, "name": "llm-5d4f-abcde", "generateName": "llm-5d4f-"},
        {"labels": {"pod-template-hash": "5d4f", "app": "llm"}},
        {"annotations": {"headroom.gpu/vram": "auto", "headroom.gpu/vram-from": "deployment-llm"}},
    ],
    ids=["the same owner", "its namespace in the object", "its names", "its labels", "its profile"],
)
def test_a_pod_of_another_namespace_gets_no_recommendation(
    decider: Decider, metadata: dict[str, Any]
) -> None:
    """The pod has the same owner, image and arguments, but the API server sets the namespace in the
    review.
    """
    answered = shown(decider, TENANT, **metadata)
    assert "VRAMProfile" not in answered
    assert "Mi" not in answered
