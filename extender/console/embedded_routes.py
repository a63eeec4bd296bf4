"""What exists in the embedded server only: playing the users and the agents of a cluster."""

from collections.abc import Awaitable, Callable, Sequence

import msgspec
from fastapi import FastAPI, HTTPException
from starlette.requests import Request

from contract.gpunode import GPUNodeStatus


class Report(msgspec.Struct):
    node: str
    status: GPUNodeStatus


_reports = msgspec.json.Decoder(list[Report])


def add_embedded_routes(
    app: FastAPI,
    report: Callable[[Sequence[tuple[str, GPUNodeStatus]]], Awaitable[str]],
    delete_pod: Callable[[str, str], str],
) -> None:
    """Both functions return "" when it was done, else a sentence that says what is not there."""

    @app.post("/embedded/v1/reports", status_code=204)
    async def reports(request: Request) -> None:
        """Replace the status of nodes, as their agents would: a list of {node, status}."""
        try:
            given = _reports.decode(await request.body())
        except msgspec.DecodeError as err:
            raise HTTPException(
                400, f'{err}; right is, for example, [{{"node": "gpu-a", "status": {{...}}}}]'
            ) from err
        if missing := await report([(one.node, one.status) for one in given]):
            raise HTTPException(404, missing)

    @app.delete("/embedded/v1/pods/{namespace}/{name}", status_code=204)
    def pod(namespace: str, name: str) -> None:
        """End a pod and delete it; its promise is taken back."""
        if missing := delete_pod(namespace, name):
            raise HTTPException(404, missing)
