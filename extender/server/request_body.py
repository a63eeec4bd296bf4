"""Reads request bodies up to a size limit."""

from starlette.requests import Request

JSON = "application/json"


class BodyTooLarge(Exception):
    """The body exceeds the limit. All of it was read, and none of it was kept."""


async def read_whole(request: Request, max_body_bytes: int) -> bytes:
    """Return the whole body.

    A body that is too large is read to its end without keeping it, because a client that is still
    writing would not see the response. Raises ``BodyTooLarge``, and ``ClientDisconnect`` of
    starlette.
    """
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= max_body_bytes:
            chunks.append(chunk)
        else:
            chunks.clear()
    if size > max_body_bytes:
        raise BodyTooLarge
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)
