"""What a ghost stage on a device's stream has in common with DeepSpeed's."""

from types import SimpleNamespace
from typing import Any

from benchmarks.gpu.ghost_stream import StreamStage


def test_its_host_waits_for_the_device_before_the_loss_as_deepspeeds_does() -> None:
    order: list[str] = []
    stage: Any = SimpleNamespace(
        _synchronize=lambda: order.append("the device"), _run_next=lambda: order.append("the loss"), _loss_slot=9
    )
    StreamStage._aggregate_total_loss(stage)
    assert order == ["the device", "the loss"], "else the ghost runs a step ahead, and flatters"
