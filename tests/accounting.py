"""Reads the API server's metric that counts the writes of all clients."""

import re
from collections import Counter

import urllib3

from tests.controlplane import ADMIN_TOKEN, ControlPlane
from tests.waiting import PATIENCE_S

_WRITES = re.compile(
    r'apiserver_request_total\{(?=[^}]*code="2)(?=[^}]*verb="(POST|PATCH|PUT|DELETE)")'
    r'(?=[^}]*,resource="([a-z]*)")(?=[^}]*subresource="([a-z]*)")[^}]*\} ([0-9.e+]+)'
)


def written(plane: ControlPlane) -> Counter[str]:
    """Count the successful writes since the API server started, by keys such as "PATCH
    gpunodes/status".
    """
    http = urllib3.PoolManager(ca_certs=str(plane.ca_file), retries=False, timeout=PATIENCE_S)
    headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
    text = http.request("GET", f"{plane.url}/metrics", headers=headers).data.decode()
    http.clear()
    counts: Counter[str] = Counter()
    for verb, resource, subresource, amount in _WRITES.findall(text):
        counts[f"{verb} {resource}/{subresource}".rstrip("/")] += int(float(amount))
    return counts
