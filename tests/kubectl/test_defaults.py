"""Tests the default requests that are suggested from measured use."""

from typing import Any

from headroom.contract.annotations import DEFAULT_VRAM, Bytes, parse_vram
from headroom.kubectl.defaults import lines, suggested_bytes

GIB = 1 << 30
MIB = 1 << 20


def pod(namespace: str, used: int | None, since: str | None = "2026-11-22T00:00:00Z") -> Any:
    """Return a row of /v1/drift. By default, the pod is 3 h old."""
    observed = [] if used is None else [on_device(used)]
    return {"namespace": namespace, "since": since, "observed": observed}


def on_device(measured: int | None, peak: int | None = None) -> Any:
    return {"measured_bytes": measured, "peak_bytes": peak}


def body(*pods: Any) -> Any:
    return {"generated_at": "2026-11-22T03:00:00.500+00:00", "pods": list(pods)}


def commands(shown: list[str]) -> list[str]:
    return [line for line in shown if not line.startswith("#")]


def test_three_pods_that_ran_for_an_hour_give_a_command_with_the_largest_use() -> None:
    shown = lines(body(pod("a", GIB), pod("a", 4 * GIB), pod("a", 2 * GIB)), None)
    assert commands(shown) == ["kubectl annotate namespace a headroom.gpu/default-vram=4608Mi"]
    assert "# a: 3 pods, at most 4.0 GiB, running for 3h" in shown


def test_too_few_or_too_young_pods_give_only_a_comment() -> None:
    young = "2026-11-22T02:56:00Z"
    for pods in (
        [pod("a", GIB)] * 2,
        [pod("a", GIB)] * 2 + [pod("a", GIB, young)] * 9,
        [pod("a", GIB, None)] * 9,
        [pod("a", GIB)] * 2 + [pod("a", None)] * 9,
    ):
        shown = lines(body(*pods), None)
        assert commands(shown) == []
        assert shown[-1] == "# kubectl annotate namespace a headroom.gpu/default-vram=1280Mi"
        assert shown[-2].startswith("# Not enough data: fewer than 3 pods have run for 1 hour.")
    shown = lines(body(pod("a", GIB), pod("a", GIB, young), pod("a", None)), None)
    assert shown[3] == (
        "# a: 2 pods, at most 1.0 GiB, running for 4m to 3h; 1 pod without a measurement"
    )


def test_pods_without_measured_use_give_no_amount() -> None:
    shown = lines(body(pod("a", None), {**pod("a", 1), "observed": [on_device(None)]}), "a")
    assert shown[3:] == ["# a: the use of 2 pods is not measured"]


def test_the_device_with_the_largest_use_counts() -> None:
    """The request of a pod applies to each of its devices."""
    two = pod("a", GIB) | {"observed": [on_device(GIB), on_device(None), on_device(3 * GIB)]}
    assert "# a: 1 pod, at most 3.0 GiB, running for 3h" in lines(body(two), "a")


def test_the_peak_counts_if_the_agent_reports_it() -> None:
    seen = pod("a", GIB) | {"observed": [on_device(2 * GIB, 5 * GIB)]}
    assert "# a: 1 pod, at most 5.0 GiB, running for 3h" in lines(body(seen), "a")
    seen = pod("a", GIB) | {"observed": [on_device(2 * GIB)]}
    assert "# a: 1 pod, at most 2.0 GiB, running for 3h" in lines(body(seen), "a")


def test_namespaces_are_sorted_and_can_be_selected() -> None:
    found = body(*[pod(name, GIB) for name in ("b", "a") for _ in range(3)])
    assert [line.split()[3] for line in commands(lines(found, None))] == ["a", "b"]
    assert [line.split()[3] for line in commands(lines(found, "b"))] == ["b"]
    assert lines(found, "c") == []


def test_suggestions_are_valid_and_above_the_use() -> None:
    for used in (0, 1, 255 * MIB, 256 * MIB, 10 * GIB, 79 * GIB + 1):
        suggested = suggested_bytes(used)
        assert suggested % (256 * MIB) == 0
        assert 1.1 * used <= suggested <= 1.1 * used + 256 * MIB
        assert suggested > 0
    shown = lines(body(*[pod("a", 10 * GIB)] * 3), "a")
    (command,) = commands(shown)
    found = parse_vram(command.partition("=")[2], DEFAULT_VRAM)
    assert found.everywhere == Bytes(11 * GIB)
