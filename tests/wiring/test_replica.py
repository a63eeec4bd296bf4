"""One replica takes what its threads hear in the order in which they heard it."""

import asyncio
import threading

from contract.kube import Container, ObjectMeta, Pod, PodSpec, ResourceRequirements
from extender.cluster.events import PodGone, PodSeen
from extender.settings import Settings
from extender.wiring.replica import Extender

GPU = ResourceRequirements(limits={"nvidia.com/gpu": "1"})


def bound_pod(uid: str) -> Pod:
    spec = PodSpec(containers=[Container(name="main", resources=GPU)], node_name="n")
    return Pod(metadata=ObjectMeta(name=uid, namespace="default", uid=uid), spec=spec)


def test_what_another_thread_heard_first_is_applied_first() -> None:
    async def play() -> Pod | None:
        extender = Extender(Settings(), unready=lambda: "")
        # A bind thread hears that the pod is bound; the loop's own, that it has gone again.
        heard = threading.Thread(target=extender.deliver, args=([PodSeen(bound_pod("u"))],))
        heard.start()
        heard.join()
        extender.deliver([PodGone("u")])
        await asyncio.sleep(0)
        return extender.cluster.pod("u")

    assert asyncio.run(play()) is None
