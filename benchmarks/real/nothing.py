"""The baseline extender, which only binds pods, as fast as Python can.

    python -m benchmarks.real.nothing --port PORT --api URL --ca FILE --token TOKEN [--swap]

It accepts all nodes with equal scores. With ``--swap`` it writes a reservation into the node's
GPUNode before the Binding, by compare-and-swap on its own last write, because any ledger has to do
at least that. ``POST /script`` makes it reject or prefer nodes, for benchmarks of kube-scheduler's
reaction; the answer contains the number of filter calls.
"""

import argparse
import asyncio
import ssl
from collections import defaultdict
from typing import Any

import aiohttp
import msgspec
import uvicorn
import uvloop

METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
GPUNODES = "/apis/headroom.gpu/v1alpha1/gpunodes"


class Named(msgspec.Struct):
    name: str


class Asked(msgspec.Struct):
    metadata: Named


class Offer(msgspec.Struct, rename="pascal"):
    pod: Asked
    node_names: msgspec.Raw


class Args(msgspec.Struct, rename="pascal"):
    pod_name: str
    pod_namespace: str
    pod_uid: str = msgspec.field(name="PodUID")
    node: str


class Script(msgspec.Struct):
    """Settings of the extender; an omitted field stays as it was."""

    #: How filter rejects pods whose names begin with "rejected". If empty, it accepts them.
    reject: str | None = None
    #: Names of such pods that filter accepts nevertheless.
    allowed: list[str] | None = None
    #: Node -> score.
    scores: dict[str, int] | None = None


REASON = "insufficient GPU memory on any device"

_script = msgspec.json.Decoder(Script)
_offer, _args = msgspec.json.Decoder(Offer), msgspec.json.Decoder(Args)


class Nothing:
    def __init__(self, api: str, ca: str, token: str, swaps: bool) -> None:
        self._api, self._ca, self._swaps = api, ca, swaps
        self._headers = {"Authorization": f"Bearer {token}"}
        self._session: aiohttp.ClientSession | None = None
        #: GPUNode -> its resourceVersion.
        self._versions: dict[str, str] = {}
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._refuse, self._allowed, self._scores = "", set[str](), dict[str, int]()
        self._filtered = 0

    async def start(self) -> None:
        context = ssl.create_default_context(cafile=self._ca)
        connector = aiohttp.TCPConnector(ssl=context, limit=64)
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        if self._swaps:
            listed = await self._call("GET", GPUNODES, None, {"Accept": METADATA_ONLY})
            for item in listed["items"]:
                metadata = item["metadata"]
                self._versions[metadata["name"]] = metadata["resourceVersion"]

    async def _call(self, method: str, path: str, body: Any, headers: dict[str, str]) -> Any:
        assert self._session is not None
        data = None if body is None else msgspec.json.encode(body)
        url = self._api + path
        async with self._session.request(method, url, data=data, headers=headers) as answer:
            content = await answer.read()
            if answer.status >= 300:
                raise RuntimeError(f"{method} {path}: {answer.status} {content.decode()}")
            return msgspec.json.decode(content)

    def _take(self, script: Script) -> bytes:
        if script.reject is not None:
            self._refuse = script.reject
        if script.allowed is not None:
            self._allowed = set(script.allowed)
        if script.scores is not None:
            self._scores = script.scores
        return b"%d" % self._filtered

    def _filter(self, offer: Offer) -> bytes:
        self._filtered += 1
        name = offer.pod.metadata.name
        if not name.startswith("rejected") or name in self._allowed or not self._refuse:
            return b'{"NodeNames":%b}' % bytes(offer.node_names)
        nowhere: dict[str, Any] = {"NodeNames": []}
        match self._refuse:
            case "error":
                return msgspec.json.encode({"Error": REASON})
            case "omitted":
                return msgspec.json.encode(nowhere)
            case key:
                names = msgspec.json.decode(offer.node_names)
                return msgspec.json.encode({**nowhere, key: dict.fromkeys(names, REASON)})

    async def bind(self, args: Args) -> None:
        if self._swaps:
            async with self._turns[args.node]:
                await self._reserve(args)
        path = f"/api/v1/namespaces/{args.pod_namespace}/pods/{args.pod_name}/binding"
        target = {"apiVersion": "v1", "kind": "Node", "name": args.node}
        metadata = {"name": args.pod_name, "namespace": args.pod_namespace, "uid": args.pod_uid}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": target}
        await self._call("POST", path, binding, {"Content-Type": "application/json"})

    async def _reserve(self, args: Args) -> None:
        reservation = {
            "namespace": args.pod_namespace,
            "name": args.pod_name,
            "attempt": "some-attempt",
            "since": "2026-11-21T00:29:21.000+00:00",
            "charges": [{"resource": "nvidia.com/gpu", "count": 1, "candidates": {"GPU-0": 1}}],
        }
        patch = {
            "metadata": {"resourceVersion": self._versions[args.node]},
            "spec": {"reservations": {args.pod_uid: reservation}},
        }
        kind = {"Content-Type": "application/merge-patch+json"}
        written = await self._call("PATCH", f"{GPUNODES}/{args.node}", patch, kind)
        self._versions[args.node] = written["metadata"]["resourceVersion"]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        match scope["path"].rpartition("/")[2]:
            case "filter":
                answer = self._filter(_offer.decode(body))
            case "bind":
                await self.bind(_args.decode(body))
                answer = b"{}"
            case "script":
                answer = self._take(_script.decode(body))
            case "prioritize":
                scores = [{"Host": node, "Score": s} for node, s in self._scores.items()]
                answer = msgspec.json.encode(scores)
            case _:
                answer = b"{}"
        length = str(len(answer)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


async def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--port", "--api", "--ca", "--token"):
        parser.add_argument(name, required=True)
    parser.add_argument("--swap", action="store_true")
    args = parser.parse_args()
    nothing = Nothing(args.api, args.ca, args.token, args.swap)
    await nothing.start()
    config = uvicorn.Config(
        nothing,
        port=int(args.port),
        log_level="warning",
        access_log=False,
        lifespan="off",
        http="httptools",
        timeout_keep_alive=120,
    )
    await uvicorn.Server(config).serve()


if __name__ == "__main__":
    uvloop.run(main())
