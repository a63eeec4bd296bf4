"""The benchmarks of the hot path measure what they claim, on a fleet of a few nodes."""

from typing import Any

import msgspec
import pytest
import typer

from benchmarks import apart, apart_results
from benchmarks.hotpath import calling, matrix
from benchmarks.hotpath.__main__ import main
from benchmarks.hotpath.bodies import Bodies, node_as_sent, pod_as_sent


@pytest.mark.slow
def test_every_case_has_every_figure() -> None:
    choice = matrix.Choice((12,), (1,), ("small",), matrix.FORMS, matrix.FITS, calls=2)
    found = msgspec.json.decode(matrix.encoded(matrix.results(choice)), type=matrix.Results)
    assert found.schema == matrix.SCHEMA
    assert {"python", "numpy", "msgspec"} <= found.versions.keys()
    cases = [measured.case for measured in found.cases]
    assert [(case.form, case.fits) for case in cases] == [
        (form, fits) for form in ("names", "objects") for fits in ("all", "one", "none")
    ]
    for measured in found.cases:
        verbs = {figures.verb: figures for figures in measured.figures}
        expected = {"filter", "explain", "whatif"}
        if measured.case.fits != "none":
            expected.add("prioritize")
        if measured.case.fits == "all":
            expected.add("bind")
        assert verbs.keys() == expected
        assert (verbs["filter"].request_bytes > 12 * 8_000) == (measured.case.form == "objects")
        for figures in verbs.values():
            assert figures.calls == 2
            assert 0 < figures.took.p50_ms <= figures.took.p99_ms <= figures.took.max_ms
            assert (figures.echo is None) == (figures.verb == "explain")
            if figures.verb in ("filter", "prioritize"):
                assert figures.peak_bytes
                assert figures.blocks_kept is not None
    assert [report.nodes for report in found.reports] == [12]


def test_an_unknown_choice_is_rejected_with_an_example() -> None:
    with pytest.raises(typer.BadParameter, match="--form names"):
        main(as_json=True, form=["bytes"])


def test_bodies_are_as_large_as_they_should_be() -> None:
    assert 8_000 < len(msgspec.json.encode(node_as_sent("gpu-a100-0001"))) < 10_000
    small = len(msgspec.json.encode(pod_as_sent("p", "1Gi")))
    large = len(Bodies(1, padding_bytes=matrix._PADDING["256Ki"]).another())
    assert small < 2_000
    assert 250 << 10 < large < 262 << 10


class Refusing:
    """A server that takes no body of this size."""

    def post(self, what: str, body: bytes = b"") -> tuple[bytes, int]:
        return msgspec.json.encode({"Error": f"body of /{what} is too large"}), 1_000_000


def test_a_rejected_body_is_reported_and_not_measured() -> None:
    case = matrix.Case(2, 0, "small", "objects", "all")
    caller: Any = Refusing()
    measured = matrix._measure(case, matrix.QUICK, caller, caller)
    assert measured.rejected == "body of /filter is too large"
    assert measured.rejection == calling.Spread(1.0, 1.0, 1.0)
    assert measured.figures == []


@pytest.mark.slow
def test_each_part_is_loaded_and_calls_are_compared_with_an_echo() -> None:
    found = apart.results(12, pods_per_device=1, seconds=0.5, rounds=1, with_quotas=False)
    assert [of.phase for of in found.phases] == [phase.name for phase in apart.PHASES]
    for of in found.phases:
        assert of.verbs.keys() == set(apart_results.VERBS)
        assert of.calls > 0
        assert of.stalls.samples > 0
        assert of.echo_stalls.samples > 0
        assert of.cpu_ratio.keys() == of.resident_mib.keys() == set(apart_results.PARTS)
    idle, *_ = found.phases
    assert {each.growth_p99 for each in idle.verbs.values()} == {1.0}
    spent = {of.phase: of.cpu_ratio for of in found.phases}
    assert spent["read"]["console"] > spent["idle"]["console"]
    assert spent["flooded"]["webhook"] > spent["idle"]["webhook"]
    assert found.burst_shown_in_s > 0
