"""Recomputes decisions about pods from the snapshot of another process (``GET /v1/snapshot``)."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from headroom.console.views.requested_pods import made_up, of_size, usual_resource
from headroom.contract.kube import Pod
from headroom.core.cluster.cluster import Cluster
from headroom.core.journal.dump import Inputs, inputs_of, state_of
from headroom.core.placement.explain import explain, verdict_digest
from headroom.core.placement.explanation_text import explanation_lines
from headroom.core.placement.fit import fit
from headroom.core.placement.request import Unreadable
from headroom.errors import BadSettings


class Replayed(msgspec.Struct, frozen=True):
    """The result for one pod."""

    pod: str
    #: Number of nodes on which the pod fits.
    fits: int
    #: The code of the reason for each node, or None if the pod fits on the node. Empty if the
    #: request is invalid.
    verdicts: dict[str, str | None]
    #: Digest of all verdicts. It does not contain node names.
    digest: str
    #: Lines that explain the nearest nodes.
    lines: list[str]


def load(path: Path) -> Inputs:
    """Return the inputs in a snapshot file. Raises ``BadSettings`` if the file cannot be used."""
    return inputs_of(path.read_bytes(), str(path))


def replay(inputs: Inputs, named: str | None, vram: str | None) -> Iterator[Replayed]:
    """Yield the result for the named pod, for a pod of size ``vram``, or for each pod that has a
    decision. Raises ``BadSettings`` if the snapshot does not contain the named pod."""
    state = state_of(inputs)
    for pod, sized in _pods(inputs, state, named, vram):
        yield _replayed(state, pod, inputs.head.now_s, sized)


def _pods(
    inputs: Inputs, state: Cluster, named: str | None, vram: str | None
) -> Iterator[tuple[Pod, bool]]:
    if vram is not None:
        yield made_up("asked", vram, 1, usual_resource(state)), True
        return
    shown = {_key(each.pod): each.pod for each in inputs.decisions}
    known = {_key(pod): pod for pod in inputs.pods}
    if named is None:
        yield from ((known.get(key, pod), False) for key, pod in sorted(shown.items()))
    elif (pod := known.get(named) or shown.get(named)) is not None:
        yield pod, False
    else:
        some = ", ".join(sorted(known | shown)[:5]) or "none"
        raise BadSettings(f"pod {named} is not in the snapshot. The snapshot contains: {some}")


def _key(pod: Pod) -> str:
    return f"{pod.metadata.namespace}/{pod.metadata.name}"


def _replayed(state: Cluster, pod: Pod, now_s: float, sized: bool) -> Replayed:
    request = state.understand(pod)
    if isinstance(request, Unreadable):
        return Replayed(_key(pod), 0, {}, "", [request.message])
    snap = state.snapshot()
    rows = np.arange(len(snap.nodes), dtype=np.int64)
    verdicts = fit(of_size(request) if sized else request, snap, rows, now_s)
    found = explain(verdicts, state.rules.weights, market=state.market)
    reasons = [verdicts.reason(i) for i in range(len(rows))]
    return Replayed(
        pod=_key(pod),
        fits=found.fits,
        verdicts=dict(
            sorted(
                (terms.name, reason.code if reason else None)
                for terms, reason in zip(snap.nodes, reasons, strict=True)
            )
        ),
        digest=verdict_digest(verdicts),
        lines=[line for node in found.nearest for line in explanation_lines(node)],
    )
