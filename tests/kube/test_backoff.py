import pytest

from headroom.runtime.kube.reflector import Backoff


@pytest.mark.parametrize(
    ("drawn", "waits"),
    [
        pytest.param(1.0, [0.5, 1.0, 2.0, 4.0, 5.0, 5.0], id="the bound doubles up to the cap"),
        pytest.param(0.5, [0.25, 0.5, 1.0, 2.0, 2.5, 2.5], id="largest jitter"),
        pytest.param(0.0, [0.0] * 6, id="no jitter"),
    ],
)
def test_pauses_grow_up_to_the_limit(drawn: float, waits: list[float]) -> None:
    backoff = Backoff(0.5, 5.0, lambda: drawn)
    assert [backoff.next_s() for _ in waits] == waits


def test_pauses_are_reset_after_a_success() -> None:
    backoff = Backoff(0.5, 5.0, lambda: 1.0)
    assert [backoff.next_s(), backoff.next_s()] == [0.5, 1.0]
    backoff.reset()
    assert backoff.next_s() == 0.5


def test_retry_after_of_the_server_is_respected_up_to_the_cap() -> None:
    backoff = Backoff(0.5, 5.0, lambda: 0.0)
    assert [backoff.next_s(3.0), backoff.next_s(3600.0)] == [3.0, 5.0]


def test_a_thousand_failures_do_not_overflow() -> None:
    backoff = Backoff(0.5, 5.0, lambda: 1.0)
    assert [backoff.next_s() for _ in range(2000)][-1] == 5.0
