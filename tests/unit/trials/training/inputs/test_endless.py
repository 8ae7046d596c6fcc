"""Batches that go on and on are worth a word, and those of long epochs are not."""

import re
from itertools import count, islice

import pytest

from tests.support.side_task_runs import Starving, make_study, run
from trials.training.inputs import endless
from trials.training.inputs.endless import with_an_end

SAID = "Study.batches has given {} batches of epoch 3 in N seconds, and goes on"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endless, "LONG_S", 0.0)
    monkeypatch.setattr(endless, "MANY", 10)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said; how long it took depends on the machine."""
    found = [record.getMessage().partition(";")[0] for record in caplog.records if record.name == endless.__name__]
    caplog.clear()
    return [re.sub(r"\d+ seconds", "N seconds", each) for each in found]


def test_far_more_than_ever_are_worth_a_word(caplog: pytest.LogCaptureFixture) -> None:
    study = make_study(own=False)

    def read(length: int) -> list[str]:
        given = with_an_end(study, count(), "Study.batches", " of epoch 3")
        assert list(islice(given, length)) == list(range(length))
        return said(caplog)

    assert read(10) == []
    assert read(25) == [SAID.format(11), SAID.format(23)], "nobody knows yet how many there are"
    assert list(with_an_end(study, range(20), "Study.batches")) == list(range(20))
    said(caplog)
    assert read(60) == [], "three times as many as there were"
    assert read(70) == [SAID.format(61)]
    assert list(islice(with_an_end(study, count(), "Study.validation"), 11))[-1] == 10
    assert said(caplog) == ["Study.validation has given 11 batches in N seconds, and goes on"]


def test_few_of_them_may_take_long_and_many_may_be_quick(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(list(with_an_end(make_study(own=False), range(10), "Study.batches"))) == 10
    monkeypatch.setattr(endless, "LONG_S", 300.0)
    assert len(list(with_an_end(make_study(own=False), range(1000), "Study.batches"))) == 1000
    assert said(caplog) == []


@pytest.mark.parametrize("own", [False, True])
def test_a_side_task_says_so_of_an_epoch(own: bool, caplog: pytest.LogCaptureFixture) -> None:
    study = make_study(own, length=lambda epoch: 3 if epoch < 2 else 12)
    run(own, Starving(()), study)
    source = "Study.trial_batches" if own else "Study.batches"
    assert set(said(caplog)) == {f"{source} has given 11 batches of epoch 3 in N seconds, and goes on"}
