"""Detects variables that the kubelet sets for Services and that look like Headroom's settings."""

import re
from collections.abc import Mapping

_SERVICE = re.compile(r"(.+)_SERVICE_HOST")
_URL = re.compile(r"(tcp|udp|sctp)://")


def service_links(env: Mapping[str, str]) -> set[str]:
    """Return the names of the variables in ``env`` that the kubelet set for Services.

    For the Service headroom-debug the kubelet sets HEADROOM_DEBUG_PORT, which is also the name of a
    setting. A value such as ``tcp://10.0.0.1:80`` shows that it is not the setting.
    """
    services = [match[1] for name in env if (match := _SERVICE.fullmatch(name))]
    return {
        name
        for name, value in env.items()
        if any(name.startswith((f"{service}_SERVICE_", f"{service}_PORT_")) for service in services)
        or (any(name == f"{service}_PORT" for service in services) and _URL.match(value))
    }
