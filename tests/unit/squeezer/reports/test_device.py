"""Power, energy and clocks of made-up runs."""

from pathlib import Path
from typing import Any

import pytest

from squeezer.reports.report import build_report, render
from tests.support.made_up_rank import MS, MadeUpRank

S = 1000
LOOK = {"free_bytes": 1, "utilization": 50, "sm_mhz": 2000, "memory_mhz": 2600, "power_mw": 7, "xid": None}


class Metered(MadeUpRank):
    """Has a look at each step's end."""

    energy_mj = 10_000
    has_counter = True

    def look(self, **read: Any) -> None:
        energy_mj = self.energy_mj if self.has_counter else None
        self.add("device", t_ns=self.now_ns, **{**LOOK, "energy_mj": energy_mj, "slowed_by": [], **read})

    def used(self, squeezed: bool | None, ms: float, watts: float, **read: Any) -> None:
        """A step, and a look at its end."""
        self.step(squeezed, ms)
        self.energy_mj += round(watts * ms)
        self.look(power_mw=round(watts * 1000), **read)


def blocks(rank: Metered) -> None:
    """Steps of two seconds: alone at 200 W, squeezed at 300 W and slower."""
    rank.look()
    for block in range(5):
        for _ in range(4):
            squeezed = bool(block % 2)
            read: dict[str, Any] = {"sm_mhz": 1800, "slowed_by": ["the power cap"]} if squeezed else {}
            rank.used(squeezed, 2 * S * (1.02 if squeezed else 1), 300 if squeezed else 200, **read)


def reported(run: Path, *ranks: MadeUpRank) -> dict[str, Any]:
    for rank in ranks:
        rank.end()
        rank.write()
    return build_report(run)


@pytest.mark.parametrize("has_counter", [True, False])
def test_power_and_energy_per_step_with_squeezing_and_without(tmp_path: Path, has_counter: bool) -> None:
    rank = Metered(tmp_path)
    rank.has_counter = has_counter
    blocks(rank)
    report = reported(tmp_path, rank)
    squeezed, alone = report["device"]["squeezed"], report["device"]["alone"]
    assert (squeezed["looks"], alone["looks"]) == (8, 10), "the job's first two steps do not count"
    assert (squeezed["power_w"], alone["power_w"]) == (pytest.approx(300), pytest.approx(200))
    assert squeezed["joules_per_step"] == pytest.approx(300 * 2.04, rel=1e-3)
    assert alone["joules_per_step"] == pytest.approx(400, rel=1e-3)
    assert (squeezed["slowed_by"], alone["slowed_by"]) == ({"the power cap": 1.0}, {})
    assert report["ranks"]["0"]["device"] == report["device"]
    text = render(report)
    for line in (
        "Device      power 300 W squeezed, 200 W alone; 612 and 400 J per step (8 and 10 looks)",
        "            SM clock 1800 MHz squeezed, 2000 MHz alone",
        "            slowed by the power cap in 100% of looks squeezed, 0% alone",
    ):
        assert f"{line}\n" in text
    assert "memory clock" not in text, "it is the same"


def test_time_of_two_kinds_of_steps_counts_for_neither(tmp_path: Path) -> None:
    rank = Metered(tmp_path)
    for _ in range(8):
        rank.step(False, 300)
        rank.step(True, 300)
        rank.step(True, 300)
        rank.look()
    for squeezed in (None, None):  # the side task starts
        rank.used(squeezed, 2 * S, 500)
    rank.step(False, 2 * S)
    rank.now_ns += 2 * S * MS  # between steps, such as an evaluation
    rank.look()
    report = reported(tmp_path, rank)
    for kind in ("squeezed", "alone"):
        of = report["device"][kind]
        assert (of["looks"], of["power_w"], of["joules_per_step"], of["slowed_by"]) == (0, None, None, None)
    assert "no steps left alone lasted from one look to the next" in render(report)


def test_devices_without_meters_and_instances_without_power(tmp_path: Path) -> None:
    rank = Metered(tmp_path / "none")
    rank.windows()
    assert reported(tmp_path / "none", rank)["device"] is None
    assert "Device" not in render(build_report(tmp_path / "none"))
    instance = Metered(tmp_path / "instance")
    instance.has_counter = False
    for _ in range(9):
        instance.step(True, 2 * S)
        instance.look(power_mw=None, utilization=None, slowed_by=None)
    squeezed = reported(tmp_path / "instance", instance)["device"]["squeezed"]
    assert (squeezed["looks"], squeezed["power_w"], squeezed["utilization"]) == (7, None, None)
    assert squeezed["sm_mhz"] == 2000


def test_several_devices_are_one_mean(tmp_path: Path) -> None:
    ranks = [Metered(tmp_path, number) for number in (0, 1)]
    for number, rank in enumerate(ranks):
        rank.look()
        for _ in range(6):
            rank.used(True, 2 * S, 100 + 100 * number)
    report = reported(tmp_path, *ranks)
    assert report["device"]["squeezed"]["power_w"] == pytest.approx(150)
    assert report["ranks"]["1"]["device"]["squeezed"]["power_w"] == pytest.approx(200)


def test_a_side_task_without_room_is_said_with_the_last_reason(tmp_path: Path) -> None:
    rank = Metered(tmp_path)
    rank.windows()
    for reason in ("100 MiB are free", "90 MiB are free"):
        rank.now_ns += 1
        rank.add("side", t_ns=rank.now_ns, event="barred", reason=reason)
    report = reported(tmp_path, rank)
    assert report["side"]["barred"] == {"times": 2, "last": "90 MiB are free"}
    assert "had no room on the device 2 times, the last time because 90 MiB are free" in render(report)
