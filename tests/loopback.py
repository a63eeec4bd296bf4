"""An HTTP client for servers that tests start on loopback, with or without TLS.

``httpx.get`` reads all certificate authorities of the machine for each call, which takes 20 ms of
CPU.
"""

import httpx

from tests.waiting import PATIENCE_S

#: Accepts any certificate, and keeps no connection open.
LOOPBACK = httpx.Client(
    verify=False,
    trust_env=False,
    timeout=PATIENCE_S,
    limits=httpx.Limits(max_keepalive_connections=0),
)
