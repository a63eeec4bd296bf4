"""Takes the advice that users get about recorded lives, and compares it with the highest peaks.

    python -m benchmarks.recommend.printed

The lives of a workload are recorded in a VRAMProfile. The advice is the text that users get: the
patches of ``kubectl headroom recommend -o patch``, and the response of the webhook to a pod with
``auto``. The comparison reads only this text and the generated lives, with its own parser.
"""

import base64
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
import typer

from benchmarks.recommend import families, workloads
from benchmarks.recommend.life import DAY, Workload
from benchmarks.recommend.replay import ENDINGS, recorded
from headroom.contract.kube import ObjectMeta
from headroom.contract.vramprofile import ProfileController, ProfileOwner, VRAMProfile
from headroom.contract.watched import GPUNodeSeen, NodeSeen, ProfileSeen
from headroom.core.recommend.pod_programs import programs_of
from headroom.core.recommend.profile import Profile
from headroom.core.recommend.profile_status import status_of
from headroom.kubectl.recommend import patches
from headroom.webhook.context import AdmissionContext, NamespaceMetadata
from headroom.webhook.review import answer_mutate, read
from tests.admission.reviews import container, manifest, node, review
from tests.builders import DISTRIBUTED, gpunode, kube_node, shared
from tests.console.asking import WALL_S, Asked

NAMESPACE, MODEL = "team-a", "NVIDIA L40S"
_UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
#: Sentences of a line of advice which state that some of the counted lives need more.
_SAYS_MORE = re.compile(
    r"of (1 life|[\d,]+ lives), some used up to|(1 life|[\d,]+ lives) of other programs used up to"
    r"|(1 life|[\d,]+ lives),.*only the whole device is safe"
    r"|[\d,]+ of [\d,]+ pods? used more, up to"
)


@dataclass(frozen=True, slots=True)
class Advice:
    """One amount that a user gets for a workload, with all text that comes with it."""

    source: str
    #: An amount such as ``9600Mi``, or empty if the advice is to keep the request.
    amount: str
    text: str


def judged(advice: Advice, highest_bytes: int, device_bytes: int) -> str:
    """Return whether an amount is at least the highest peak, or whether its text states that it is
    not. ``auto`` becomes a share of the device, here all of it, if nothing is recommended."""
    if not advice.amount:
        return "none"
    if advice.amount.endswith("%"):
        return "a share"
    if bytes_of(advice.amount) >= min(highest_bytes, device_bytes):
        return "not below"
    return "below, stated" if _SAYS_MORE.search(advice.text) else "below, not stated"


def bytes_of(amount: str) -> int:
    """Return the bytes of an amount of GPU memory."""
    number, unit = re.fullmatch(r"(\d+)([KMGT]i)?", amount).groups()  # type: ignore[union-attr]
    return int(number) * (_UNITS[unit] if unit else 1)


def advised(workload: Workload, until_s: float) -> Iterator[Advice]:
    """Yield the advice for a Deployment after its lives until ``until_s``."""
    newest = max(
        (life for life in workload.lives if life.start_s < until_s), key=lambda each: each.start_s
    )
    profile, asked = _profile(workload, until_s), Asked()
    device = shared("GPU-0", memory_bytes=workload.device_bytes, model=MODEL)
    seen = gpunode(device, name="n", plugin=DISTRIBUTED)
    asked.writer.apply([NodeSeen(kube_node("n")), GPUNodeSeen(seen, 0.0)])
    asked.context.profiles.apply([ProfileSeen(profile)])
    lines = [*patches(asked.get("/v1/recommendations").json())]
    amount = ""
    for line in lines:
        if not line.startswith("#"):
            (patch,) = (json.loads(word) for word in shlex.split(line) if word.startswith("{"))
            amount = patch["spec"]["template"]["metadata"]["annotations"]["headroom.gpu/vram"]
    yield Advice("patch", amount, "\n".join(lines))
    yield _injected(_pod(newest.program), asked, node(devices=(device,)))


def _injected(pod: dict[str, Any], asked: Asked, on: Any) -> Advice:
    """Return the amount that the webhook writes into a pod with ``auto``."""
    context = AdmissionContext(
        namespace=NamespaceMetadata(NAMESPACE),
        nodes=(on,),
        profile=asked.context.profiles.of,
        now_s=asked.context.wall_s(),
    )
    answer = answer_mutate(read(json.dumps(review(pod)).encode()), lambda _: context)
    response = json.loads(answer)["response"]
    written = {"vram": "", "vram-from": ""}
    if "patch" in response:
        for step in json.loads(base64.b64decode(response["patch"])):
            for name in written:
                if step["path"].endswith(f"headroom.gpu~1{name}"):
                    written[name] = step["value"]
    text = "\n".join([written["vram-from"], *response.get("warnings", ())])
    return Advice("auto", written["vram"], text)


def _pod(program: str) -> dict[str, Any]:
    pod = manifest("auto,default=100%", container(args=[program]))
    pod["metadata"] |= {
        "ownerReferences": [
            {
                **{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "llm-5d4f"},
                **{"uid": "rs", "controller": True},
            }
        ],
        "labels": {"pod-template-hash": "5d4f"},
    }
    return pod


def _profile(workload: Workload, until_s: float) -> VRAMProfile:
    """Return the profile as the API server stores it. Its newest life is at ``WALL_S``."""
    kept, later_s = Profile(), WALL_S - until_s
    lives = kept.container("main", MODEL)
    programs = {
        name: programs_of(json.dumps(_pod(name)).encode())[0]["main"].fingerprint
        for name in {each.program for each in workload.lives}
    }
    begun = [each for each in workload.lives if each.start_s < until_s]
    for each in sorted(begun, key=lambda each: each.end_s):
        if each.end_s <= until_s:
            life = recorded(each, each.end_s, ENDINGS[each.ending])
            lives.record(programs[each.program], _moved(life, later_s))
    lives.replace_running(
        (programs[each.program], _moved(recorded(each, until_s), later_s))
        for each in begun
        if each.end_s > until_s and each.peak_until(until_s)
    )
    lives.memory_bytes = workload.device_bytes
    owner = ProfileOwner(kind="Deployment", name="llm", api_version="apps/v1")
    status = status_of(kept, owner, {}, WALL_S)
    controllers = [ProfileController(kind="ReplicaSet", name="llm")]
    metadata = ObjectMeta(namespace=NAMESPACE, name="deployment-llm")
    profile = VRAMProfile(
        metadata=metadata, status=msgspec.structs.replace(status, controllers=controllers)
    )
    return msgspec.json.decode(msgspec.json.encode(profile), type=VRAMProfile)


def _moved(life: Any, later_s: float) -> Any:
    return replace(life, started_s=life.started_s + later_s, until_s=life.until_s + later_s)


def judge_all(some: Iterable[tuple[Workload, float]]) -> Counter[str]:
    """Count the outcomes of the advice for these workloads, each after its lives until a time."""
    found: Counter[str] = Counter()
    for workload, until_s in some:
        highest = max(each.peak_until(until_s) for each in workload.lives)
        for advice in advised(workload, until_s):
            outcome = judged(advice, highest, workload.device_bytes)
            found[f"{advice.source}: {outcome}"] += 1
            if outcome == "below, not stated":
                typer.echo(f"{workload.name}, {highest:,} bytes: {advice}", err=True)
    return found


def main(
    count: Annotated[int, typer.Option(help="Number of workloads of each family.")] = 20,
    seed: Annotated[str, typer.Option(help="Seed of the workloads.")] = "printed-1",
    days: Annotated[list[float] | None, typer.Option(help="Ages of the recorded lives.")] = None,
) -> None:
    """Print how many amounts in printed patches and of auto are below a peak."""
    ages: Sequence[float] = days or (10.0, 30.0, 90.0)
    last = max(ages)
    for name in (*families.TUNED, *families.JUDGED, "calibration"):
        drawn = [
            workloads.workload(seed, index, last, 2.0, held_out=True)
            if name == "calibration"
            else families.workload(name, seed, index, last, 2.0)
            for index in range(count)
        ]
        found = judge_all(
            (each, age * DAY)
            for each in drawn
            for age in ages
            if any(life.peak_until(age * DAY) for life in each.lives)
        )
        parts = (f"{outcome} {found[outcome]}" for outcome in sorted(found))
        typer.echo(f"{name}: {'; '.join(parts)}")


if __name__ == "__main__":
    typer.run(main)
