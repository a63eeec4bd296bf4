"""Measures every verb in every case, compared with an echo of the same body, for ``--json``.

Each call is for another pod, lists the nodes in another order, and follows a report of another
node. The bodies of a case are the same in every run, because the seed determines them."""

import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal, get_args

import msgspec
import typer

from benchmarks.hotpath.bodies import SEED, Bodies, Form, bind_of
from benchmarks.hotpath.calling import Caller, Spread, spread
from benchmarks.hotpath.fleet import DEVICES, FITS_NOWHERE, ROOMY
from benchmarks.hotpath.machine import cores, processor, versions
from benchmarks.hotpath.replica import replica, run
from benchmarks.hotpath.reports import Report, cost_of_reports
from headroom.contract.annotations import VRAM

SCHEMA = "headroom.hotpath/v1"
Verb = Literal["filter", "prioritize", "bind", "explain", "whatif"]
#: On how many nodes the pods of a case fit.
Fits = Literal["all", "one", "none"]
PodSize = Literal["small", "256Ki"]
VERBS, FORMS, FITS, POD_SIZES = map(get_args, (Verb, Form, Fits, PodSize))

_ASKED: dict[str, tuple[str, ...]] = {
    "all": ("1Gi", "2Gi", "4Gi", "8Gi", "5%"),
    "one": (ROOMY,),
    "none": (FITS_NOWHERE,),
}
_PADDING = {"small": 0, "256Ki": 254 << 10}
_WARM_UP = 5
#: Maximum number of calls with whole nodes, and of explanations. They are slow and vary less.
_MOST_LONG = 30
#: Number of pods that stay bound in a case. Older pods are deleted to keep nodes from filling up.
_KEPT_BOUND = 60
#: Ratio of nodes on which a pod for "all" must fit. With six pods per device, bound pods fill a
#: third of 100 nodes.
_NEARLY_ALL = 0.6
#: Number of pods in one what-if.
_WHATIF_PODS = 6


class Case(msgspec.Struct, frozen=True):
    nodes: int
    pods_per_device: int
    pod: PodSize
    form: Form
    fits: Fits


class Figures(msgspec.Struct):
    """One verb in one case. The i-th echo had the same body as the i-th call."""

    verb: Verb
    calls: int
    request_bytes: int
    took: Spread
    #: Null for explain, because it has no body.
    echo: Spread | None
    ratio_p50: float | None
    ratio_p99: float | None
    #: Most bytes allocated at a time during one call, and number of blocks that outlive it; null if
    #: not measured.
    peak_bytes: int | None
    blocks_kept: int | None


class Measured(msgspec.Struct):
    case: Case
    figures: list[Figures]
    #: The server's error if there are no figures, otherwise null.
    rejected: str | None = None
    #: Duration of the rejected call, including the body.
    rejection: Spread | None = None


class Results(msgspec.Struct):
    schema: str
    machine: str
    cores: int
    versions: dict[str, str]
    seed: int
    devices_per_node: int
    calls: int
    cases: list[Measured]
    #: Cost of one report, by the size of the fleet.
    reports: list[Report]
    took_s: float


class Choice(msgspec.Struct, frozen=True):
    """The selected part of the matrix."""

    nodes: Sequence[int] = (100, 1_000, 5_000)
    pods_per_device: Sequence[int] = (0, 2, 6)
    pods: Sequence[PodSize] = POD_SIZES
    forms: Sequence[Form] = FORMS
    fits: Sequence[Fits] = FITS
    verbs: Sequence[Verb] = VERBS
    calls: int = 100
    #: Whether filter returns only the best node, which is the shipped default for the separate
    #: kube-scheduler. Then kube-scheduler does not call prioritize.
    best_only: bool = False


QUICK = Choice(
    nodes=(100, 1_000), pods_per_device=(2,), pods=("small",), forms=("names",), calls=20
)


def results(choice: Choice) -> Results:
    began_s = time.monotonic()
    cases: list[Measured] = []
    for nodes, pods_per_device in itertools.product(choice.nodes, choice.pods_per_device):
        target = partial(run, best_only=choice.best_only)
        with replica(nodes, pods_per_device, target) as where:
            caller, debug = Caller(where.verbs), Caller(where.debug)
            for case in _cases(choice, nodes, pods_per_device):
                _say(f"{time.monotonic() - began_s:>6.0f} s  {case}")
                cases.append(_measure(case, choice, caller, debug))
            caller.close()
            debug.close()
    _say(f"{time.monotonic() - began_s:>6.0f} s  what a report costs")
    return Results(
        schema=SCHEMA,
        machine=processor(),
        cores=cores(),
        versions=versions(),
        seed=SEED,
        devices_per_node=DEVICES,
        calls=choice.calls,
        cases=cases,
        reports=[cost_of_reports(nodes) for nodes in choice.nodes],
        took_s=round(time.monotonic() - began_s, 1),
    )


def _cases(choice: Choice, nodes: int, pods_per_device: int) -> Iterator[Case]:
    for pod, form, fits in itertools.product(choice.pods, choice.forms, choice.fits):
        yield Case(nodes, pods_per_device, pod, form, fits)


def _measure(case: Case, choice: Choice, caller: Caller, debug: Caller) -> Measured:
    bodies = Bodies(case.nodes, _ASKED[case.fits], _PADDING[case.pod], case.form)
    if rejected := _rejected(bodies, caller):
        took = [caller.post("filter", bodies.another())[1] for _ in range(3)]
        return Measured(case, [], rejected, spread(took))
    run = _Run(case, choice, caller, debug)
    calls = min(choice.calls, _MOST_LONG) if case.form == "objects" else choice.calls
    for turn in range(-_WARM_UP, calls):
        run.one_pod(bodies, turn)
    return Measured(case, run.figures())


def _rejected(bodies: Bodies, caller: Caller) -> str | None:
    answer = msgspec.json.decode(caller.post("filter", bodies.another())[0])
    return answer["Error"] or None


class _Run:
    """The calls of one case."""

    def __init__(self, case: Case, choice: Choice, caller: Caller, debug: Caller) -> None:
        self._case, self._best_only = case, choice.best_only
        self._verbs = [v for v in choice.verbs if v != "prioritize" or not self._best_only]
        self._caller, self._debug = caller, debug
        self._took: dict[Verb, list[int]] = {}
        self._echoed: dict[Verb, list[int]] = {}
        #: The filter calls of the bound pods, oldest first.
        self._bound = deque[bytes]()
        #: The last body of each verb.
        self._bodies: dict[Verb, bytes] = {}

    def one_pod(self, bodies: Bodies, turn: int) -> None:
        """Make the calls of kube-scheduler for one pod. Turns before 0 are not counted."""
        self._caller.post("drive/report")
        body = bodies.another()
        answer = self._call("filter", body, turn)
        shown = msgspec.json.decode(answer)
        if shown["Error"]:
            raise RuntimeError(f"{self._case}: {shown['Error']}")
        passed = bodies.of_those_that_passed(body, answer)
        # Nodes that earlier bound pods have filled do not count.
        most_fit = 1 if self._best_only else self._case.nodes
        least, most = {
            "all": (round(_NEARLY_ALL * most_fit), most_fit),
            "one": (1, 1),
            "none": (0, 0),
        }[self._case.fits]
        count = len(shown["NodeNames"] or (shown["Nodes"] or {}).get("items") or ())
        if not least <= count <= most:
            raise RuntimeError(f"{self._case}: fits on {count} nodes, not on {least} to {most}")
        if "explain" in self._verbs and turn < _MOST_LONG:
            self._explain(body, turn)
        if "whatif" in self._verbs and turn < _MOST_LONG:
            self._whatif(body, turn)
        if not passed:
            return
        best = ""
        if self._best_only and self._case.form == "names":
            (best,) = shown["NodeNames"]
        elif "prioritize" in self._verbs:
            scores = msgspec.json.decode(self._call("prioritize", passed, turn))
            best = max(scores, key=lambda each: each["Score"])["Host"]
        if best:
            self._end_hold(body, best, turn)

    def _end_hold(self, body: bytes, node: str, turn: int) -> None:
        """Bind the pod even if bind is not measured, or delete it if it fits on only one node.

        Memory is held for a pod between filter and bind. If no bind followed, each filter call
        would weigh the nodes of more and more waiting pods."""
        self._caller.post("drive/admit", body)
        if self._case.fits == "one":  # bound pods would fill the node
            self._caller.post("drive/delete", body)
            return
        shown = msgspec.json.decode(self._call("bind", bind_of(body, node), turn))
        if shown["Error"]:
            raise RuntimeError(f"{self._case}: not bound: {shown['Error']}")
        self._bound.append(body)
        if len(self._bound) > _KEPT_BOUND:
            self._caller.post("drive/delete", self._bound.popleft())

    def _call(self, verb: Verb, body: bytes, turn: int) -> bytes:
        if verb not in self._verbs:
            return self._caller.post(verb, body)[0]
        _, echoed = self._caller.post("echo", body)
        answer, took = self._caller.post(verb, body)
        if turn >= 0:
            self._took.setdefault(verb, []).append(took)
            self._echoed.setdefault(verb, []).append(echoed)
            self._bodies[verb] = body
        return answer

    def _explain(self, body: bytes, turn: int) -> None:
        metadata = msgspec.json.decode(body)["Pod"]["metadata"]
        path = f"v1/explain?pod={metadata['namespace']}/{metadata['name']}"
        took = self._debug.get(path)[1]
        if turn >= 0:
            self._took.setdefault("explain", []).append(took)

    def _whatif(self, body: bytes, turn: int) -> None:
        """Ask where some equal pods would be placed, one after another."""
        vram = msgspec.json.decode(body)["Pod"]["metadata"]["annotations"][VRAM]
        asked = msgspec.json.encode({"pods": [{"vram": vram, "count": _WHATIF_PODS}]})
        _, echoed = self._caller.post("echo", asked)
        answer, took = self._debug.post("v1/whatif", asked)
        placed = msgspec.json.decode(answer)["placed"]
        if bool(placed) != (self._case.fits != "none"):
            raise RuntimeError(f"{self._case}: of {_WHATIF_PODS} pods {placed} are placed")
        if turn >= 0:
            self._took.setdefault("whatif", []).append(took)
            self._echoed.setdefault("whatif", []).append(echoed)
            self._bodies["whatif"] = asked

    def figures(self) -> list[Figures]:
        return [self._of(verb, took) for verb, took in self._took.items()]

    def _of(self, verb: Verb, took_ns: Sequence[int]) -> Figures:
        took, echo = spread(took_ns), None
        taken: dict[str, int] = {}
        if verb in self._echoed:
            echo = spread(self._echoed[verb])
        if verb in ("filter", "prioritize"):
            answer, _ = self._caller.post(f"drive/allocations/{verb}", self._bodies[verb])
            taken = msgspec.json.decode(answer)
        return Figures(
            verb=verb,
            calls=len(took_ns),
            request_bytes=len(self._bodies.get(verb, b"")),
            took=took,
            echo=echo,
            ratio_p50=round(took.p50_ms / echo.p50_ms, 3) if echo else None,
            ratio_p99=round(took.p99_ms / echo.p99_ms, 3) if echo else None,
            peak_bytes=taken.get("peak_bytes"),
            blocks_kept=taken.get("blocks_kept"),
        )


def encoded(found: Results) -> bytes:
    return msgspec.json.format(msgspec.json.encode(found), indent=2)


def _say(line: str) -> None:
    typer.echo(line, err=True)
