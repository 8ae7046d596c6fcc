"""Which parts of the GPU suite are measured."""

from benchmarks.gpu_suite import PARTS, parts_of


def test_speeds_of_fused_training_are_measured_only_if_they_are_named() -> None:
    assert parts_of(None) == [name for name in PARTS if name != "fusion"]
    assert parts_of("fusion") == ["fusion"] and "fusion" in PARTS
    assert parts_of("ghost") == ["ghost"]
