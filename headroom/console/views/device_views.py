"""Keeps the views of devices between two answers.

A page reads a list of nodes about once a second, and few of the nodes change meanwhile.
"""

from threading import Lock

from starlette.requests import Request

from headroom.bounded import Bounded
from headroom.console.responses import rounded_s
from headroom.console.view_context import shared
from headroom.console.views.devices import Aged, DeviceView, device_view
from headroom.core.placement.device_accounting import DeviceTerms

#: Maximum number of devices whose views are kept: the page lists 50 nodes.
MOST_DEVICES = 800


def shared_views(request: Request) -> "DeviceViews":
    """Return the kept views of devices, for all readers of the application."""
    return shared(request, DeviceViews)


class DeviceViews:
    """The views of the devices that were listed last. May be used by several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        #: UUID -> the terms of a device and their view.
        self._views: Bounded[str, tuple[DeviceTerms, DeviceView]] = Bounded(MOST_DEVICES)

    def of(self, terms: DeviceTerms, aged: Aged) -> DeviceView:
        """Return the view of a device, with the present age of its SM activity."""
        uuid = terms.device.uuid
        with self._lock:
            known = self._views.get(uuid)
        if known is not None and known[0] is terms:
            # Another thread may set the age as well, to nearly the same value.
            known[1].sm_activity_age_s = rounded_s(aged(terms))
            return known[1]
        view = device_view(terms, aged)
        with self._lock:
            self._views[uuid] = terms, view
        return view
