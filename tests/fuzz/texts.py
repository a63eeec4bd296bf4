"""Texts of people: annotations, settings, flags, fleets and manifests.

An invalid text is rejected by the one exception of its reader, whose message is short and shows
what is valid.
"""

import contextlib
import io
import json
from collections.abc import Callable
from random import Random
from typing import Any

from agent.settings import read_settings
from contract import annotations
from contract.errors import BadAnnotation, BadQuantity
from contract.quantity import parse_bytes
from extender.admission.review import MalformedReview, answer_mutate, answer_validate, read
from extender.config.fleet_file import load_fleet
from extender.config.loading import load_settings
from extender.convert.manifests import BadManifest, Options, convert
from extender.errors import BadSettings
from tests.admission.reviews import applied, around, manifest, node, patch_of, review
from tests.fuzz.hostile import RAW, TEXTS, garbled
from tests.fuzz.node import Files, NodeTarget, of_bytes, of_trees
from tests.fuzz.watchdog import Harm

PPM = 1_000_000
MAX_DEVICE_BYTES = 1 << 44
MAX_INT64 = (1 << 63) - 1

_MOST_MESSAGE = 700


def _annotation_texts(random: Random) -> bytes:
    text = random.choice(TEXTS)
    if random.random() < 0.3:
        text = random.choice((",", "=", "")).join((text, random.choice(TEXTS)))
    data = text.encode("utf-8", "surrogatepass")
    return garbled(data, random) if random.random() < 0.7 else data


_PARSERS: tuple[Callable[[str], Any], ...] = (
    annotations.parse_vram,
    annotations.parse_policy,
    annotations.parse_max_sm,
    annotations.parse_processes,
    annotations.parse_device_choice,
    annotations.parse_reserve,
    annotations.parse_gated,
    annotations.parse_share,
)


def _annotations(data: bytes) -> bool:
    text = data.decode("utf-8", "replace")
    taken = False
    for parse in _PARSERS:
        try:
            found = parse(text)
        except BadAnnotation as err:
            if ". Example: headroom.gpu/" not in str(err) or len(str(err)) > _MOST_MESSAGE:
                raise Harm(f"{parse.__name__}: {err}") from err
            continue
        taken = True
        if isinstance(found, annotations.VramAnnotation):
            for amount in (found.everywhere, *found.by_container.values()):
                if isinstance(amount, annotations.Bytes):
                    _within(amount.count_bytes, MAX_DEVICE_BYTES)
                elif amount is not None:
                    _within(amount.ppm, PPM)
            if annotations.parse_vram(annotations.render_vram(found)) != found:
                raise Harm(f"{text!r:.200} is not what it is rendered as")
    try:
        if not -MAX_INT64 - 1 <= parse_bytes(text) <= MAX_INT64:
            raise Harm(f"{text!r:.200} is beyond int64")
    except BadQuantity:
        pass
    return taken


def _within(figure: int, most: int) -> None:
    if not 0 < figure <= most:
        raise Harm(f"{figure} is not 1..{most}")


_SETTINGS = (
    b"policy: spread\nmax_body: 16Mi\nresources: [nvidia.com/gpu, 'nvidia.com/mig-*']\n",
    b"stale_after_s: 90\nblind_after_s: 91.5\nmax_body: 64Mi\non_miss: evict\n",
    b"host: 127.0.0.1\nverbs_port: 8888\nreject_unannotated: true\nvisible_devices: charge\n",
    b"nodes: [{name: gpu-a, count: 2, gpus: 1, memory: 24Gi, sharing: time-slicing, replicas: 4}]\n"
    b"namespaces: [{name: team, defaultVram: 6Gi}]\n",
    b"stale_after_s: .nan\nblind_after_s: .inf\nmax_body: 1e400\n",
    b"a: &a [x]\nb: &b [*a, *a]\nresources: *b\n",
    b"max_body: " + b"9" * 5000 + b"\n",
    b"resources: " + b"[" * 40 + b"]" * 40 + b"\n",
)
_MANIFESTS = (
    b"apiVersion: v1\nkind: Pod\nmetadata: {name: p, annotations: {gpu-memory: '8000'}}\n"
    b"spec:\n  schedulerName: kai-scheduler\n  containers:\n  - name: main\n"
    b"    resources: {limits: {nvidia.com/gpu: 1, nvidia.com/gpumem: 3000}}\n---\n"
    b"apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: d}\nspec:\n  template:\n    spec:\n"
    b"      containers:\n      - {name: a, resources: {limits: {aliyun.com/gpu-mem: 3}}}\n",
)


def _settings() -> Callable[[bytes], bool]:
    files = Files()

    def take(data: bytes) -> bool:
        path = files.put("settings.yaml", data)
        taken = False
        for load in (load_settings, load_fleet):
            try:
                load(path)
                taken = True
            except BadSettings as err:
                if str(path) not in str(err):
                    raise Harm(f"does not show where: {err}") from err
        return taken

    return take


def _manifest(data: bytes) -> bool:
    try:
        convert(data.decode(), Options(1 << 30, None))
    except (BadManifest, UnicodeDecodeError):
        return False
    return True


_POD = manifest(None, annotations={"headroom.gpu/gated": "true", "headroom.gpu/share": "limit"})
_REVIEWS = (
    review(_POD),
    review(manifest("main=8Gi"), operation="UPDATE", old=manifest("8Gi")),
    review({"spec": {"jobTemplate": {"spec": {"template": _POD}}}}, kind="CronJob"),
    review({"metadata": {"annotations": {"headroom.gpu/default-vram": "1Gi"}}}, kind="Namespace"),
)
_AROUND = around(node(choice="gated"), gate_image="gate", mirror=True)


def _review(data: bytes) -> bool:
    """The writes to an API server, of which every patch can be applied."""
    try:
        asked = read(data)
        answers = [
            decide(asked, lambda name: _AROUND) for decide in (answer_mutate, answer_validate)
        ]
    except MalformedReview:
        return False
    for answer in answers:
        operations = patch_of(json.loads(answer)["response"])
        if operations:
            with contextlib.suppress(ValueError, RecursionError):  # ours passes over what it skips
                obj = json.loads(data)["request"]["object"]
                applied(obj, operations)
    return True


_FLAGS = (
    "--node n --interval 5 --heartbeat 30 --listen :9410 --no-publish",
    "--node n --resource nvidia.com/gpu --replicas 4 --sharing time-slicing",
    "--node n --dcgm-url http://h:9400/metrics --dcgm-interval 10 --driver-timeout 10 --pause 1",
    "--node n --device-choice steered --state /run/x",
)


def _flag_texts(random: Random) -> bytes:
    words = random.choice(_FLAGS).split()
    at = random.randrange(len(words))
    words[at] = random.choice((random.choice(TEXTS), random.choice(RAW).decode("latin-1"), ""))
    return "\0".join(words).encode("utf-8", "replace")


def _flags(data: bytes) -> bool:
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            read_settings(data.decode("utf-8", "replace").split("\0"), {})
    except SystemExit as err:
        if err.code != 2:
            raise Harm(f"ends with {err.code}") from err
        return False
    return True


def targets() -> dict[str, tuple[int, Callable[[], NodeTarget]]]:
    return {
        "annotations": (
            200,
            lambda: NodeTarget("annotations", _annotation_texts, _annotations),
        ),
        "reviews": (30, lambda: NodeTarget("reviews", of_trees(*_REVIEWS), _review)),
        "settings": (2, lambda: NodeTarget("settings", of_bytes(*_SETTINGS), _settings())),
        "flags": (4, lambda: NodeTarget("flags", _flag_texts, _flags)),
        "manifests": (1, lambda: NodeTarget("manifests", of_bytes(*_MANIFESTS), _manifest)),
    }
