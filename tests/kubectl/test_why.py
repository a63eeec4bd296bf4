"""What ``kubectl headroom why`` prints of an attempt."""

from headroom.kubectl.why import phases

FILTER = {"fits": 0, "offered": 2, "took_ms": 0.5}
NOTHING = {"filter": None, "prioritize": None, "preempt": None, "bind": None}


def test_who_left_for_a_pod_is_told_between_filter_and_bind() -> None:
    preempt = {"took_ms": 4.12, "told": ["team/a (priority 0) leaves node n", "they asked"]}
    bind = {"outcome": "bound", "message": None, "node": "n", "took_ms": 9.0}
    assert phases(NOTHING | {"filter": FILTER, "preempt": preempt, "bind": bind}) == [
        "filter: 0 of 2 nodes could take it, in 0.5 ms",
        "preempt: in 4.1 ms",
        "  team/a (priority 0) leaves node n",
        "  they asked",
        "bind: bound to n, in 9.0 ms",
    ]


def test_an_older_replica_tells_no_victims() -> None:
    assert phases(NOTHING | {"preempt": {"took_ms": 1.0}}) == ["preempt: in 1.0 ms"]
