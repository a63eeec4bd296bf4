"""An HTTP client for servers that tests start on loopback, with or without TLS.

``httpx.get`` would read all certificate authorities of the machine in each call, which takes 20 ms
of CPU.
"""

import httpx

from tests.waiting import PATIENCE_S

#: A client that accepts any certificate and keeps no connection open.
LOOPBACK = httpx.Client(
    verify=False,
    trust_env=False,
    timeout=PATIENCE_S,
    limits=httpx.Limits(max_keepalive_connections=0),
)
