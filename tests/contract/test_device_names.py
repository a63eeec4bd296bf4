"""Tests the names of devices that people read."""

import pytest

from headroom.contract.device_names import device_name, noun, nouns

UUID = "5e8a1b2c-1b2c-3d4e-5f60-718293a4b5c6"


@pytest.mark.parametrize(
    ("uuid", "index", "kind", "expected"),
    [
        (f"GPU-{UUID}", 3, "gpu", "3"),
        (f"GPU-{UUID}", -1, "gpu", "GPU-5e8a1b2c"),
        (f"MIG-{UUID}", 0, "mig", "MIG-5e8a1b2c"),
        # The first name is a UUID from a driver before r470, and the other name does not come from
        # the driver.
        (f"MIG-GPU-{UUID}/1/0", 0, "mig", f"MIG-GPU-{UUID}/1/0"),
        ("GPU-l4-0000-1", -1, "gpu", "GPU-l4-0000-1"),
    ],
)
def test_a_device_is_named_by_its_index_or_by_its_other_fields(
    uuid: str, index: int, kind: str, expected: str
) -> None:
    assert device_name(uuid, index, kind) == expected


def test_a_name_in_a_sentence_has_the_word_gpu_once() -> None:
    assert [noun(each) for each in ("0", "GPU-5e8a1b2c", "MIG-5e8a1b2c", "C")] == [
        *("GPU 0", "GPU-5e8a1b2c", "MIG-5e8a1b2c", "GPU C"),
    ]
    assert nouns(["0", "1"]) == "GPU 0, 1"
    assert nouns(["GPU-5e8a1b2c", "1"]) == "GPU-5e8a1b2c, GPU 1"
