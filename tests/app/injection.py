"""Raises exceptions at awaits and callbacks of a replica, and plays a cluster on it.

``python -m tests.app.injection CALL...`` finds every point in the source of ``MODULES``, and plays
the same life of a cluster once for every ``TOGETHER`` points, which all raise in it at this call of
them. A point gets a life of its own if it was not reached in that one, or if fewer failures were
counted than points raised. A line of JSON for each other life shows which of its points were
reached, what was still missing at the end, and how many failures were counted. A point is

* an ``await``, an ``async with`` or an ``async for``: the exception comes in place of it;
* a callback, which is what ``__init__`` or a function takes as a ``Callable``: the exception comes
  when it is called.
"""

import ast
import gc
import importlib.abc
import importlib.machinery
import inspect
import json
import logging
import multiprocessing
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, TypeVar

#: The state, the controllers, and the ledger that they write to.
MODULES = (
    "headroom.core.cluster.cluster_writer",
    "extender.ledger.bind",
    "extender.ledger.initialise",
    "extender.ledger.ledger",
    "extender.ledger.reservations",
    "extender.ledger.node_batcher",
    "extender.event_recorder",
    "headroom.runtime.follow.cluster_view",
    "extender.scheduler.outcome_recorder",
    "extender.eviction.controller",
    "extender.overuse",
    "extender.starts",
    "headroom.runtime.follow.event_queue",
    "headroom.runtime.telemetry",
    "headroom.runtime.loops",
    "extender.extended_resource",
    "headroom.console.metrics",
    "extender.preemption.controller",
    "extender.preemption.writer",
    "headroom.runtime.settings.reload",
    "extender.extender",
    "extender.scheduler.bind",
    "extender.requeue.controller",
    "extender.pending_events",
    "extender.reconcile.controller",
    "headroom.console.feed.feed",
)
#: Aliases of ``Callable`` in these modules.
CALLABLES = ("Callable", "Post")
#: Callbacks that the parts of the ledger have from ``Reservations``.
LEDGER_CALLBACKS = ("self._reservations.known", "self._new_id")
#: Points that the life of ``tests.app.life`` may not reach, by reason. They raise beside others.
NOT_REACHED = {
    "is compared or iterated, not called": {
        "headroom.runtime.follow.event_queue:EventQueue._react: called self.reactions",
        "extender.event_recorder:EventRecorder.writes: called self._post",
    },
    "goes on after another exception only": {
        "headroom.runtime.loops:Loops.keep.kept: waited await asyncio.sleep(AGAI",
        "headroom.runtime.loops:Loops.failing: called self._failures_of",
    },
    "belongs to other processes or to tests": {
        "extender.ledger.initialise:one_by_one: waited await call",
        "headroom.runtime.follow.cluster_view:ClusterView._collect: waited await self.begun.wait()",
        "headroom.runtime.follow.cluster_view:ClusterView._collect: waited await collect_garbage()",
        "headroom.runtime.follow.event_queue:EventQueue.idle: waited await self._idle.wait()",
        "extender.reconcile.controller:ReconcileController.once: waited await self.check_reserva",
        "extender.reconcile.controller:ReconcileController.once: waited await self.prepare_nodes",
        "extender.reconcile.controller:ReconcileController.once: waited await self.record_events",
    },
    "is handed to a port of HTTP, which answers with 500": {
        "headroom.runtime.follow.cluster_view:ClusterView.context: called quotas",
        "headroom.console.metrics:FleetCollector._holdings: called self._held",
        "headroom.console.metrics:FleetCollector._pending_pods: called self._pending",
    },
    "takes a race or a list that is not played here": {
        "extender.ledger.bind:Binder._fit_without_gpunode: waited await self._store.read_p",
        "extender.ledger.bind:Binder._reserve: waited await self._reserve(node",
        "extender.ledger.bind:Binder._reserve_together: waited await self._fit_without_",
        "extender.ledger.ledger:Ledger.requeue: waited await self._store.read_p",
        "headroom.runtime.loops:Loops._run.moved: called self._monotonic_s",
        "extender.preemption.controller:PreemptionController._record_nominations: "
        "waited await self._record(pod, ",
    },
}
#: Each life waits half of its time.
PROCESSES = 2
#: Points that raise in one life. They are far apart in ``MODULES``.
TOGETHER = 4
T = TypeVar("T")


class Injected(Exception):
    """No error that anything expects."""


@dataclass
class Points:
    """Receives the reached points of the loaded code; some of them raise, each once."""

    names: list[str] = field(default_factory=list)
    #: Point that raises -> calls of it until then.
    raising: dict[int, int] = field(default_factory=dict)

    def add(self, name: str) -> int:
        self.names.append(name)
        return len(self.names) - 1

    def reach(self, point: int) -> None:
        if point in self.raising:
            self.raising[point] -= 1
            if self.raising[point] == 0:
                raise Injected(self.names[point])

    async def waited(self, point: int, work: Awaitable[T]) -> T:
        try:
            self.reach(point)
        except Injected:
            if inspect.iscoroutine(work):
                work.close()
            raise
        return await work

    def entered(self, point: int, value: T) -> T:
        self.reach(point)
        return value

    def called(self, point: int, function: Callable[..., T] | None) -> Callable[..., T] | None:
        if not callable(function):  # None, or a list of callbacks
            return function

        def call(*args: Any, **named: Any) -> T:
            self.reach(point)
            return function(*args, **named)

        return call


POINTS = Points()


class Marking(ast.NodeTransformer):
    """Make each point of a module report to ``POINTS`` when it is reached."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._scopes: list[str] = []
        #: Parameters that are callbacks, of the functions around; attributes, of the class.
        self._parameters: list[set[str]] = []
        self._attributes: set[str] = set()

    def _point(self, node: ast.expr, what: str) -> ast.expr:
        where = f"{self._module}:{'.'.join(self._scopes)}"
        number = POINTS.add(f"{where}: {what} {ast.unparse(node)[:24]}")
        return ast.copy_location(ast.Constant(number), node)

    def _marked(self, how: str, node: ast.expr, value: ast.expr) -> ast.Call:
        point = self._point(node, how)
        function = ast.Attribute(ast.Name("_points", ast.Load()), how, ast.Load())
        return ast.copy_location(ast.Call(function, [point, value], []), node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        before, self._attributes = self._attributes, set(_callback_attributes(node))
        self._scopes.append(node.name)
        self.generic_visit(node)
        self._scopes.pop()
        self._attributes = before
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        self._scopes.append(node.name)
        # What __init__ takes is kept in an attribute.
        own = set() if node.name == "__init__" else _callback_parameters(node)
        self._parameters.append(own)
        node.body = [self.visit(each) for each in node.body]
        self._parameters.pop()
        self._scopes.pop()
        return node

    def visit_Await(self, node: ast.Await) -> ast.AST:
        marked = self._marked("waited", node, node.value)
        marked.args[1] = self.visit(node.value)
        node.value = marked
        return node

    def visit_AsyncFor(self, node: ast.AsyncFor) -> ast.AST:
        marked = self._marked("entered", node.iter, node.iter)
        self.generic_visit(node)
        marked.args[1] = node.iter
        node.iter = marked
        return node

    def visit_AsyncWith(self, node: ast.AsyncWith) -> ast.AST:
        self.generic_visit(node)
        for item in node.items:
            item.context_expr = self._marked("entered", item.context_expr, item.context_expr)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        mine = isinstance(node.value, ast.Name) and node.value.id == "self"
        shared = ast.unparse(node) in LEDGER_CALLBACKS
        is_callback = shared or (mine and node.attr in self._attributes)
        if is_callback and isinstance(node.ctx, ast.Load):
            return self._marked("called", node, node)
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if isinstance(node.ctx, ast.Load) and any(node.id in own for own in self._parameters):
            return self._marked("called", node, node)
        return node


def _is_callable(annotation: ast.expr | None) -> bool:
    return annotation is not None and any(
        isinstance(each, ast.Name) and each.id in CALLABLES for each in ast.walk(annotation)
    )


def _callback_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    return {each.arg for each in arguments if _is_callable(each.annotation)}


def _callback_attributes(node: ast.ClassDef) -> Iterator[str]:
    for method in node.body:
        if isinstance(method, ast.AnnAssign) and _is_callable(method.annotation):
            assert isinstance(method.target, ast.Name)
            yield method.target.id
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            taken = _callback_parameters(method)
            for each in ast.walk(method):
                if isinstance(each, ast.Assign) and isinstance(each.value, ast.Name | ast.Tuple):
                    yield from _kept(each, taken)
                if isinstance(each, ast.AnnAssign) and _is_callable(each.annotation):
                    yield from _attribute(each.target)


def _kept(assigned: ast.Assign, taken: set[str]) -> Iterator[str]:
    """The attributes that keep one of these parameters."""
    for target in assigned.targets:
        pairs: Iterable[tuple[ast.expr, ast.expr]] = [(target, assigned.value)]
        if isinstance(target, ast.Tuple) and isinstance(assigned.value, ast.Tuple):
            pairs = zip(target.elts, assigned.value.elts, strict=True)
        for to, value in pairs:
            if isinstance(value, ast.Name) and value.id in taken:
                yield from _attribute(to)


def _attribute(target: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Attribute):
        yield target.attr


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        tree = ast.parse(self.get_data(self.path), self.path)
        marked = ast.fix_missing_locations(Marking(fullname).visit(tree))
        return compile(marked, self.path, "exec")

    def exec_module(self, module: Any) -> None:
        module._points = POINTS
        super().exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in MODULES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = _Loader(name, spec.origin)
        return spec


def main(calls: Sequence[int]) -> None:
    sys.meta_path.insert(0, _Finder())
    # Only now may anything of the extender be loaded.
    from tests.app.life_world import quicken

    quicken()
    logging.disable()
    # The processes share what is loaded, and do not collect it.
    gc.freeze()
    points = range(len(POINTS.names))
    lives = -(-len(points) // TOGETHER)
    named = set().union(*NOT_REACHED.values())
    with multiprocessing.get_context("fork").Pool(PROCESSES) as processes:
        for call in calls:
            shown = processes.starmap(_play, [(points[i::lives], call) for i in range(lives)], 1)
            alone = [point for each in shown for point in each["again"]]
            alone = [([point], call) for point in alone if POINTS.names[point] not in named]
            for each in (*shown, *processes.starmap(_play, alone, 1)):
                print(json.dumps(each))  # noqa: T201


def _play(points: Sequence[int], call: int) -> dict[str, Any]:
    from tests.app.life import live
    from tests.app.life_world import Told

    POINTS.raising = dict.fromkeys(points, call)
    try:
        told = live()
    except Injected:
        # The process does not start, and its parent gets the error.
        told = Told(failures=1)
    reached = [point for point in points if POINTS.raising[point] <= 0]
    is_counted = told.failures >= len(reached)
    return {
        "points": [POINTS.names[point] for point in points],
        "reached": [POINTS.names[point] for point in reached],
        "again": sorted(set(points) - set(reached)) if is_counted else [*points],
        "call": call,
        "missing": told.missing,
        "failures": told.failures,
    }


if __name__ == "__main__":
    main([int(each) for each in sys.argv[1:]])
