"""Variables of the environment that begin as ours do and are none."""

import re
from collections.abc import Mapping

_SERVICE = re.compile(r"(.+)_SERVICE_HOST")
_URL = re.compile(r"(tcp|udp|sctp)://")


def service_links(env: Mapping[str, str]) -> set[str]:
    """Those by which the kubelet tells pods of the Services of their namespace: the Service
    headroom-debug is HEADROOM_DEBUG_PORT, and no setting. One that was said besides stays ours."""
    services = [found[1] for name in env if (found := _SERVICE.fullmatch(name))]
    return {
        name
        for name, value in env.items()
        if any(name.startswith((f"{service}_SERVICE_", f"{service}_PORT_")) for service in services)
        or (any(name == f"{service}_PORT" for service in services) and _URL.match(value))
    }
