"""Keeps the views of devices between two answers.

The page reads a list of nodes about once a second, and few of these nodes change in between.
"""

from threading import Lock

from starlette.requests import Request

from headroom.bounded_dict import Bounded
from headroom.console.responses import rounded_s
from headroom.console.view_context import shared
from headroom.console.views.devices import Aged, DeviceView, device_view
from headroom.core.placement.device_accounting import DeviceTerms

#: Maximum number of devices whose views are kept. The page lists 50 nodes.
MOST_DEVICES = 800


def shared_views(request: Request) -> "DeviceViews":
    """Return the kept views of devices, which all readers of the application share."""
    return shared(request, DeviceViews)


class DeviceViews:
    """The views of the devices that were listed last. Several threads may use it."""

    def __init__(self) -> None:
        self._lock = Lock()
        #: UUID -> the terms of a device, and the view made of them.
        self._views: Bounded[str, tuple[DeviceTerms, DeviceView]] = Bounded(MOST_DEVICES)

    def of(self, terms: DeviceTerms, aged: Aged) -> DeviceView:
        """Return the view of a device, with the current age of its SM activity."""
        uuid = terms.device.uuid
        with self._lock:
            known = self._views.get(uuid)
        if known is not None and known[0] is terms:
            # Another thread may set the age at the same time, to nearly the same value.
            known[1].sm_activity_age_s = rounded_s(aged(terms))
            return known[1]
        view = device_view(terms, aged)
        with self._lock:
            self._views[uuid] = terms, view
        return view
