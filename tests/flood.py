"""Sends requests to one server without a pause: python -m tests.flood URL

Requests the expensive views of a console (http URL), or sends reviews of 100 KiB pods to a webhook
(https URL). Ignores the responses, and repeats requests that get no response.
"""

import asyncio
import contextlib
import json
import ssl
import sys
from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Any

import httpx

from tests.admission.reviews import manifest, review

Request = tuple[str, str, Any]
_RETRY_S = 0.05
_PADDING = "x" * 100_000
#: Number of concurrent connections to a webhook.
CONNECTIONS = 8
#: Requests that each connection to a console repeats: the requests of the web page and a scraper, a
#: what-if, and the largest tables.
VIEWS: Sequence[Sequence[Request]] = (
    [("GET", "/v1/fleet", None)],
    [("GET", "/v1/nodes?order=fullest&limit=50", None)],
    [("GET", "/v1/pods?order=used", None)],
    [("GET", "/v1/pending?limit=1", None), ("GET", "/metrics", None), ("GET", "/v1/teams", None)],
    [("POST", "/v1/whatif", {"pods": [{"vram": "20Gi", "count": 50}]})],
    [("GET", "/v1/nodes", None), ("GET", "/v1/drift", None)],
)


async def _ask(url: str, asked: Iterable[Request]) -> None:
    tls = ssl._create_unverified_context()
    async with httpx.AsyncClient(base_url=url, verify=tls, timeout=60, trust_env=False) as client:
        for method, path, body in asked:
            content = None if body is None else json.dumps(body).encode()
            with contextlib.suppress(httpx.TransportError):
                await client.request(method, path, content=content)
                continue
            await asyncio.sleep(_RETRY_S)


async def flood(url: str) -> None:
    """Send requests until this process is killed."""
    asked = VIEWS
    if url.startswith("https:"):
        large = review(manifest(annotations={"team/notes": _PADDING}))
        asked = [[("POST", "/mutate", large)]] * CONNECTIONS
    await asyncio.gather(*(_ask(url, cycle(each)) for each in asked))


if __name__ == "__main__":
    asyncio.run(flood(sys.argv[1]))
