"""What is written when an answer goes out in one piece."""

import asyncio

import pytest

from extender.wiring.onepiece import OnePiece

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
HEAD, BODY = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n", b"{}"


class Wire(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent.append(bytes(data))

    def close(self) -> None:
        self.sent.append(b"closed")

    def is_closing(self) -> bool:
        return b"closed" in self.sent


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        pytest.param([HEAD, BODY], [HEAD + BODY], id="head and body"),
        pytest.param([HEAD, b"{", b"}"], [HEAD + b"{", b"}"], id="what comes later"),
        pytest.param([HEAD, BODY, HEAD, BODY], [HEAD + BODY] * 2, id="one answer, then another"),
        pytest.param(
            [b"HTTP/1.1 100 Continue\r\n\r\n"], [b"HTTP/1.1 100 Continue\r\n\r\n"], id="go on"
        ),
        pytest.param([HEAD], [], id="a head alone waits"),
    ],
)
def test_a_head_goes_with_what_follows(written: list[bytes], sent: list[bytes]) -> None:
    wire = Wire()
    out = OnePiece(wire)
    for data in written:
        out.write(data)
    assert wire.sent == sent


def test_a_head_that_nothing_follows_goes_out_all_the_same() -> None:
    wire = Wire()
    out = OnePiece(wire)
    out.write(HEAD)
    out.flush()
    out.flush()
    assert wire.sent == [HEAD]
    out.write(HEAD)
    out.close()
    assert wire.sent == [HEAD, HEAD, b"closed"]
    assert out.is_closing()
