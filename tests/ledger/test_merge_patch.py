"""Tests the merge patches that change one spec into another."""

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from extender.ledger.kube_store import merge_patch, spec_patch
from headroom.contract.gpunode import GPUNodeSpec
from tests.agent.scripted import merged
from tests.ledger.client import reservation

_documents = st.recursive(
    st.one_of(st.integers(), st.text(max_size=3), st.booleans(), st.lists(st.integers())),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, min_size=1),
    max_leaves=12,
)
_objects = st.dictionaries(st.sampled_from("abcd"), _documents)


@given(before=_objects, after=_objects)
def test_a_merge_patch_turns_before_into_after(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    patch = merge_patch(before, after)
    assert merged(before, patch) == after
    assert (patch == {}) == (before == after)


_reservations = st.dictionaries(
    st.sampled_from("abc"),
    st.dictionaries(st.sampled_from(["GPU-0", "GPU-1"]), st.integers(1, 3), min_size=1).map(
        lambda candidates: reservation(**candidates)
    ),
)
_specs = st.builds(
    GPUNodeSpec,
    initialised=st.booleans(),
    reservations=_reservations,
    reserved=st.sampled_from(["", "1Gi"]),
)


@given(before=_specs, changes=_specs, kept=st.sets(st.sampled_from("abc")))
def test_a_patch_omits_unchanged_reservations(
    before: GPUNodeSpec, changes: GPUNodeSpec, kept: set[str]
) -> None:
    same = {uid: held for uid, held in before.reservations.items() if uid in kept}
    after = msgspec.structs.replace(changes, reservations={**changes.reservations, **same})
    patch = spec_patch(before, after)
    assert msgspec.convert(merged(msgspec.to_builtins(before), patch), GPUNodeSpec) == after
    assert not patch.get("reservations", {}).keys() & same.keys()
    assert patch.get("reservations", {}) is not None
