"""Decodes and encodes kube-scheduler's extender API (extender/v1) with strict checks.

Go writes absent fields as null. The fields of the extender API have names in PascalCase, but the
fields inside Pod and Node have the names of the Kubernetes API. With nodeCacheCapable,
kube-scheduler sends only the names of nodes. Without it, kube-scheduler sends whole objects, which
are returned byte for byte.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from headroom.contract.kept_fields import kept_pod
from headroom.contract.kube import Pod
from headroom.contract.pod_limits import MAX_POD_BYTES, sized
from headroom.contract.printable import printable
from headroom.core.preemption.victim_search import Offer


class MalformedBody(ValueError):
    """The body differs from what kube-scheduler sends. The message names the field and the
    mistake."""


class NodeList(msgspec.Struct):
    items: list[msgspec.Raw] | None = None


NULL = msgspec.Raw(b"null")
#: The last field of a filter or prioritize call with nodeCacheCapable, up to its first name.
_NAMES_BEGIN, _NAMES_END = b'"NodeNames":[', b"]}"
#: The maximum score that kube-scheduler accepts from an extender.
MAX_SCORE = 10


class FilterArgs(msgspec.Struct, rename="pascal"):
    """The body of a filter or prioritize call."""

    pod: Pod | None = None
    nodes: NodeList | None = None
    node_names: msgspec.Raw = NULL


class RawPod(msgspec.Struct, rename="pascal"):
    """The undecoded pod in the body of a filter or prioritize call."""

    pod: msgspec.Raw = NULL


class BindArgs(msgspec.Struct, rename="pascal"):
    pod_name: str = ""
    pod_namespace: str = ""
    pod_uid: str = msgspec.field(default="", name="PodUID")
    node: str = ""


class MetaPod(msgspec.Struct):
    uid: str = msgspec.field(default="", name="UID")


class MetaVictims(msgspec.Struct):
    pods: list[MetaPod] | None = msgspec.field(default=None, name="Pods")
    pdb_violations: int = msgspec.field(default=0, name="NumPDBViolations")


class Victims(msgspec.Struct):
    pods: list[Pod] | None = msgspec.field(default=None, name="Pods")
    pdb_violations: int = msgspec.field(default=0, name="NumPDBViolations")


class PreemptArgs(msgspec.Struct, rename="pascal"):
    pod: Pod | None = None
    node_name_to_victims: dict[str, Victims] | None = None
    node_name_to_meta_victims: dict[str, MetaVictims] | None = None

    def offers(self) -> dict[str, Offer]:
        """Return the victims by node, whether they were sent as whole pods or as uids."""
        if self.node_name_to_meta_victims is not None:
            return {
                node: Offer(
                    tuple(pod.uid for pod in victims.pods or ()), _count(victims.pdb_violations)
                )
                for node, victims in self.node_name_to_meta_victims.items()
            }
        return {
            node: Offer(
                tuple(pod.metadata.uid for pod in victims.pods or ()),
                _count(victims.pdb_violations),
                {pod.metadata.uid: pod for pod in victims.pods or ()},
            )
            for node, victims in (self.node_name_to_victims or {}).items()
        }


def _count(number: int) -> int:
    """Clamp a number of pods to the range from 0 to 2^31."""
    return min(max(number, 0), 1 << 31)


class FilterResult(msgspec.Struct, rename="pascal"):
    nodes: dict[str, list[msgspec.Raw]] | None = None
    node_names: list[str] | None = None
    failed_nodes: dict[str, str] = {}
    #: The reason for each rejected node, as a sentence, by node.
    failed_and_unresolvable_nodes: dict[str, str] = {}
    error: str = ""


class Priority(msgspec.Struct, rename="pascal"):
    host: str
    score: int


class BindResult(msgspec.Struct, rename="pascal"):
    error: str = ""


class PreemptResult(msgspec.Struct, rename="pascal"):
    node_name_to_meta_victims: dict[str, MetaVictims] = {}


class _NamedMeta(msgspec.Struct):
    name: str


class _NamedNode(msgspec.Struct):
    metadata: _NamedMeta


T = TypeVar("T")
_filter_args = msgspec.json.Decoder(FilterArgs)
_raw_pod = msgspec.json.Decoder(RawPod)
_bind_args = msgspec.json.Decoder(BindArgs)
_preempt_args = msgspec.json.Decoder(PreemptArgs)
_named_node = msgspec.json.Decoder(_NamedNode)
_names = msgspec.json.Decoder(Sequence[str])
_encoder = msgspec.json.Encoder()


class Offered(msgspec.Struct):
    """The pod and the nodes of a filter or prioritize call."""

    pod: Pod
    #: Whole nodes in the order of ``names``, which the response repeats unchanged. None if only
    #: names were sent.
    objects: list[msgspec.Raw] | None = None
    #: Names of the nodes as a JSON array, exactly as they were sent: the bytes of ``text`` from
    #: ``begin`` to ``end``. Empty if whole nodes were sent.
    text: bytes = b""
    begin: int = 0
    end: int = 0
    #: Names of the nodes. If kube-scheduler sent only names, this is empty until ``decode_names``
    #: is called.
    names: Sequence[str] = ()

    def decode_names(self) -> None:
        """Decode ``names``. This is a separate step, because decoding 5,000 names takes longer than
        decoding the pod. Raises ``MalformedBody``."""
        if self.objects is None:
            names_json = memoryview(self.text)[self.begin : self.end]
            self.names = _decoded(_names, names_json, "NodeNames")

    def may_cover(self, names_bytes: int) -> bool:
        """Return whether names with this length as a JSON array may be the names that were sent.

        This saves decoding 5,000 names, which takes a fifth of a filter call. It is only a guess,
        because kube-scheduler may offer a new node instead of another one.
        """
        return self.end - self.begin == names_bytes

    def has_name(self, name: str) -> bool:
        """Return whether the name was sent, without decoding the other names."""
        return self.text.find(_encoder.encode(name), self.begin, self.end) >= 0


def decode_offer(body: bytes) -> Offered:
    """Decode the body of filter or prioritize without its names. Raises ``MalformedBody``."""
    begin = _begin_of_names(body)
    rest = body if begin is None else body[:begin] + b"null}"
    args = _decoded(_filter_args, rest)
    pod = kept_pod(_complete(args.pod))
    if len(rest) > MAX_POD_BYTES:  # the pod may be too large, or there are many nodes
        pod = sized(pod, len(_decoded(_raw_pod, rest).pod))
    if begin is not None:
        return Offered(pod, text=body, begin=begin, end=len(body) - 1)
    if (names_json := bytes(args.node_names)) != b"null":
        return Offered(pod, text=names_json, end=len(names_json))
    if args.nodes is None or args.nodes.items is None:
        raise MalformedBody('neither NodeNames nor Nodes.items is given, as in "NodeNames":["n1"]')
    names = [_decoded(_named_node, item).metadata.name for item in args.nodes.items]
    return Offered(pod, args.nodes.items, names=names)


def _begin_of_names(body: bytes) -> int | None:
    """Return where the array of names begins, if it is the last field, as in kube-scheduler's
    calls.

    So the names need not be parsed with the pod, which would take five times as long as the pod
    alone. Return None if another field follows, or if a name contains a bracket, which no name of a
    node does.
    """
    begin = body.find(_NAMES_BEGIN)
    is_last = begin >= 0 and body.find(b"]", begin) == len(body) - len(_NAMES_END)
    return begin + len(_NAMES_BEGIN) - 1 if is_last and body.endswith(_NAMES_END) else None


def decode_bind(body: bytes) -> BindArgs:
    """Decode the body of bind. Raises ``MalformedBody``, also if a field is missing or empty."""
    args = _decoded(_bind_args, body)
    for name, value in (
        ("PodName", args.pod_name),
        ("PodNamespace", args.pod_namespace),
        ("PodUID", args.pod_uid),
        ("Node", args.node),
    ):
        if not value:
            raise MalformedBody(f"{name} is missing or empty")
    return args


def decode_preempt(body: bytes) -> tuple[Pod, dict[str, Offer]]:
    """Decode the body of preempt into the pod and the victims by node. Raises ``MalformedBody``."""
    args = _decoded(_preempt_args, body)
    return _complete(args.pod), args.offers()


def _complete(pod: Pod | None) -> Pod:
    """Return the pod. Raises ``MalformedBody`` if the pod, its name or its uid is missing."""
    if pod is None:
        raise MalformedBody("Pod is missing")
    for name, value in (("name", pod.metadata.name), ("uid", pod.metadata.uid)):
        if not value:
            raise MalformedBody(f"Pod.metadata.{name} is missing or empty")
    return pod


def _decoded(
    decoder: msgspec.json.Decoder[T], body: bytes | memoryview | msgspec.Raw, what: str = "body"
) -> T:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as err:
        raise MalformedBody(f"{what} is not what kube-scheduler sends: {err}") from err
    except (msgspec.DecodeError, UnicodeDecodeError) as err:
        raise MalformedBody(f"{what} is not JSON: {err}") from err
    except RecursionError as err:
        raise MalformedBody("body is nested too deeply") from err


def encode_filter(
    offered: Offered,
    passed: NDArray[np.int64],
    codes: NDArray[np.int8] | None,
    sentences: Sequence[str],
    resolvable: NDArray[np.bool_] | None = None,
) -> bytes:
    """Return the response to filter, with names or whole nodes as in the call.

    ``passed`` contains the indices of the nodes that pass. ``codes`` (n,) contains the index in
    ``sentences`` of the reason of each rejected node, or is None if no node is rejected. All
    sentences must be printable. A node with code 0 that does not pass is omitted without a reason.
    ``resolvable`` (n,) is the mask of the rejected nodes on which kube-scheduler may search for
    victims, or None if there are no such nodes.
    """
    result = FilterResult()
    if codes is not None:
        rejected = codes.nonzero()[0]
        if resolvable is not None:
            found = resolvable[rejected]
            result.failed_nodes = _reasons(offered, rejected[found], codes, sentences)
            rejected = rejected[~found]
        result.failed_and_unresolvable_nodes = _reasons(offered, rejected, codes, sentences)
    if offered.objects is None:
        result.node_names = [offered.names[i] for i in passed.tolist()]
    else:
        result.nodes = {"items": [offered.objects[i] for i in passed.tolist()]}
    return _encoder.encode(result)


def _reasons(
    offered: Offered,
    rejected: NDArray[np.int64],
    codes: NDArray[np.int8],
    sentences: Sequence[str],
) -> dict[str, str]:
    """Return the sentence of each rejected node by its name."""
    reasons = zip(rejected.tolist(), codes[rejected].tolist(), strict=True)
    return {offered.names[i]: sentences[code] for i, code in reasons}


def encode_filter_error(message: str) -> bytes:
    return _encoder.encode(FilterResult(error=go_text(message)))


def encode_priorities(winner: str | None) -> bytes:
    """Return a list of {Host, Score} that contains only the winner. The list is empty if there is
    no winner.

    kube-scheduler assumes a score of 0 for all other nodes. Parsing the scores of 5,000 nodes would
    take kube-scheduler longer than the extender needs to find the best node. With a single score, a
    user's preference for another node always competes with the same value.
    """
    if winner is None:
        return b"[]"
    return _encoder.encode([Priority(host=winner, score=MAX_SCORE)])


def encode_alike(names: Sequence[str], chosen: NDArray[np.bool_]) -> bytes:
    """Return a list of {Host, Score} with an equal score for each chosen node. The list is empty if
    all nodes are chosen."""
    if chosen.all():
        return b"[]"
    hosts = (names[i] for i in np.flatnonzero(chosen).tolist())
    return _encoder.encode([Priority(host=host, score=MAX_SCORE) for host in hosts])


def encode_bind(message: str) -> bytes:
    """Return the response to bind. ``message`` is empty if the pod is bound."""
    return _encoder.encode(BindResult(go_text(message)))


def encode_preempt(victims: Mapping[str, Offer]) -> bytes:
    """Return the response to preempt with the victims' uids by node, because kube-scheduler reads
    no other form of the response."""
    return _encoder.encode(
        PreemptResult(
            {
                node: MetaVictims([MetaPod(uid) for uid in offer.uids], offer.pdb_violations)
                for node, offer in victims.items()
            }
        )
    )


def go_text(message: str) -> str:
    """Return at most 1,000 printable characters of the message. Percent signs are replaced, because
    Go would interpret them as format verbs."""
    return printable(message.replace("%", " percent"))[:1000]
