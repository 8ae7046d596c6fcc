"""Which trials that wait are taken for begun."""

from pathlib import Path

from tests.support.fused_and_solo import AtOnce
from tests.support.simulated import EPOCHS, Pretended
from trials.search.worker import SearchWorker, WorkerConfig


def test_an_enqueued_point_with_the_attributes_of_another_trial_is_its_own(tmp_path: Path) -> None:
    config = WorkerConfig(storage=f"{tmp_path}/study.journal", study_name="s", worker="me", directory=tmp_path)
    worker = SearchWorker(Pretended(3), config, AtOnce())
    worker.ask(1)
    worker.report(0, EPOCHS, 0.5, True, history={"loss": [1.0]})
    (ended,) = worker._study.get_trials()
    worker._study.enqueue_trial({"x": 0.25}, user_attrs=ended.user_attrs)
    assert worker.ask(1)["trials"] == [{"number": 1, "params": {"x": 0.25}}]
    worker.stop()
    again = SearchWorker(Pretended(3), config, AtOnce())
    assert again.ask(1)["trials"] == [{"number": 1, "params": {"x": 0.25}, "epoch": 0}]
    assert again._study.get_trials()[1].params == {"x": 0.25}
