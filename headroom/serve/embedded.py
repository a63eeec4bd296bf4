"""Serves the nodes of a fleet file from memory, without a cluster or a GPU."""

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime

from extender.extender import Extender
from extender.ledger.embedded_store import AsyncStore, EmbeddedStore
from headroom.console.views.embedded_routes import add_embedded_routes
from headroom.contract.gpunode import GPUNodeStatus
from headroom.contract.kube import Namespace, Node
from headroom.contract.watched import Relisted
from headroom.core.cluster.changes import Event
from headroom.errors import BadSettings, StoreNotFound
from headroom.runtime.debug_port import debug_port
from headroom.runtime.follow.sm_history import sm_history
from headroom.runtime.server.tls import ServerTls
from headroom.runtime.settings.constraints import is_loopback
from headroom.runtime.settings.fleet_file import Fleet
from headroom.runtime.settings.reload import ANYWHERE, Origin
from headroom.runtime.settings.settings import Settings
from headroom.serve.shared_process import console_beside, serve_beside

#: A report is never stale, because reports change only on request.
NEVER_STALE_S = 1e12


async def serve_embedded(
    settings: Settings,
    fleet: Fleet,
    announce: Callable[[str], None],
    origin: Origin = ANYWHERE,
) -> None:
    """Serve the fleet of a file from memory until a signal arrives.

    Reports do not age, because only the user changes them. Raise ``BadSettings`` if other machines
    could connect, because requests cannot be authorized without a cluster.
    """
    if far := [at for at in (settings.verbs_at, settings.debug_at) if not is_loopback(at)]:
        raise BadSettings(
            f"host is {far[0]}, but the embedded server has no access control, so it listens only "
            "on a loopback address. Example: host: 127.0.0.1"
        )
    settings = settings.model_copy(update={"stale_after_s": NEVER_STALE_S})
    extender = Extender(settings, unready=lambda: "", origin=origin)
    store = EmbeddedStore(extender.deliver, time.monotonic, watch=extender.enqueue)
    for event in _fleet_events(fleet, store):
        extender.deliver([event])
    await extender.event_queue.idle()
    ledger = extender.open_ledger(AsyncStore(store))

    async def report(reports: Sequence[tuple[str, GPUNodeStatus]]) -> str:
        missing = _missing(lambda: store.report(reports))
        await extender.event_queue.idle()
        return missing

    def delete_pod(namespace: str, name: str) -> str:
        return _missing(lambda: store.delete_pod(namespace, name))

    console = console_beside(extender)
    debug = console.app()
    add_embedded_routes(debug, report, delete_pod)
    verbs = extender.verbs_app(ledger, store)
    async with sm_history(
        settings, extender.telemetry, extender.cluster.activities, extender.enqueue
    ):
        debug_tls = ServerTls(settings.debug_tls) if settings.debug_tls else None
        second = debug_port(settings, debug, debug_tls)
        await serve_beside(extender, ledger, verbs, second, announce, console)


def _fleet_events(fleet: Fleet, store: EmbeddedStore) -> Iterator[Event]:
    now_s = time.monotonic()
    yield Relisted(Namespace, tuple(fleet.kube_namespaces()), now_s)
    yield Relisted(Node, tuple(fleet.kube_nodes()), now_s)
    for gpunode in fleet.gpunodes(datetime.now(UTC)):
        created = store.create_gpunode(gpunode)
        assert gpunode.status is not None
        store.report([(created.name, gpunode.status)])


def _missing(action: Callable[[], object]) -> str:
    try:
        action()
    except StoreNotFound as err:
        return str(err)
    return ""
