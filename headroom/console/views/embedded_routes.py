"""Routes of the embedded server that simulate the users and agents of a cluster."""

from collections.abc import Awaitable, Callable, Sequence

import msgspec
from fastapi import FastAPI, HTTPException
from starlette.requests import Request

from headroom.contract.gpunode import GPUNodeStatus


class Report(msgspec.Struct):
    node: str
    status: GPUNodeStatus


_reports = msgspec.json.Decoder(list[Report])


def add_embedded_routes(
    app: FastAPI,
    report: Callable[[Sequence[tuple[str, GPUNodeStatus]]], Awaitable[str]],
    delete_pod: Callable[[str, str], str],
) -> None:
    """Add the routes to the application.

    Both functions return "" on success, or a sentence that names the missing object.
    """

    @app.post("/embedded/v1/reports", status_code=204)
    async def reports(request: Request) -> None:
        """Replace the status of nodes as their agents would. Takes a list of {node, status}."""
        try:
            received = _reports.decode(await request.body())
        except msgspec.DecodeError as err:
            raise HTTPException(
                400, f'{err}. Example: [{{"node": "gpu-a", "status": {{...}}}}]'
            ) from err
        if missing := await report([(one.node, one.status) for one in received]):
            raise HTTPException(404, missing)

    @app.delete("/embedded/v1/pods/{namespace}/{name}", status_code=204)
    def pod(namespace: str, name: str) -> None:
        """End and delete a pod, which removes its reservation."""
        if missing := delete_pod(namespace, name):
            raise HTTPException(404, missing)
