"""For how long a node takes no pods that had to send one away."""

from extender.state.eviction_candidates import BackOffs

FIRST_S = 10.0
FORGOTTEN_S = 900.0
LONGEST_S = 320.0


def test_a_node_that_sent_a_pod_away_is_left_alone_for_a_while() -> None:
    backs = BackOffs()
    backs.note("n", {"p"}, 100.0)
    assert backs.holds("n")
    assert not backs.holds("m")
    assert backs.over(100.0 + FIRST_S - 0.1) == []
    assert backs.over(100.0 + FIRST_S) == ["n"]
    backs.end("n")
    assert not backs.holds("n")


def test_the_same_mark_counts_once() -> None:
    backs = BackOffs()
    for at_s in (100.0, 105.0, 109.0):
        backs.note("n", {"p"}, at_s)
    assert backs.over(100.0 + FIRST_S) == ["n"]
    assert backs.marks("n")
    backs.note("n", set(), 110.0)
    assert not backs.marks("n")


def test_every_further_one_doubles_it_up_to_a_limit() -> None:
    backs, at_s, took_s = BackOffs(), 0.0, []
    for number in range(8):
        backs.note("n", {f"p{number}"}, at_s)
        long_s = next(s for s in range(1000) if backs.over(at_s + s))
        took_s.append(long_s)
        at_s += long_s
    assert took_s == [10, 20, 40, 80, 160, 320, 320, LONGEST_S]


def test_the_back_off_starts_again_after_a_long_time_without_evictions() -> None:
    backs = BackOffs()
    backs.note("n", {"p"}, 0.0)
    backs.note("n", {"q"}, 1.0)
    backs.note("n", {"r"}, 1.0 + FORGOTTEN_S)
    assert backs.over(1.0 + FORGOTTEN_S + FIRST_S) == ["n"]


def test_a_node_that_is_gone_is_forgotten() -> None:
    backs = BackOffs()
    backs.note("n", {"p"}, 0.0)
    backs.gpunode_gone("n")
    assert not backs.holds("n")
    assert not backs.marks("n")
    backs.note("n", {"p"}, 1.0)
    assert backs.over(1.0 + FIRST_S) == ["n"]
