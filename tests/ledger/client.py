"""Provides a Kubernetes store that tests call from their own thread, and functions that
write as other clients.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from kubernetes.client import Configuration

from headroom.contract.gpunode import Charge, Reservation
from headroom.runtime.kube.client import KubeApi
from tests.blocking import Blocking, Loop


@contextlib.contextmanager
def over(configuration: Configuration, loop: Loop, **how: Any) -> Iterator[Blocking]:
    """Yield a store that uses this API server."""
    lists = KubeApi(configuration)
    try:
        yield loop.store(configuration, lists, **how)
    finally:
        lists.close()


def reservation(**candidates: int) -> Reservation:
    charge = Charge(resource="nvidia.com/gpu", count=1, candidates=candidates)
    return Reservation(namespace="a", name="p", charges=[charge], attempt="1")
