"""When a target may begin before the search has ended, and which surrogates are trained again before it."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import TrialState, create_trial

from ds_hooks.shared.trial_attributes import MILESTONE
from tests.support.paths import ROOT
from trials import load_study
from trials.confirmation import unconfirmed
from trials.search.optuna_study import NoStudyError
from trials.search.storage.optuna_storage import open_storage
from trials.training.member import build_member
from trials.transfer import CONFIRMS, FIRST_SEED, Source, confirm, confirmed, prepare, spent, wait_for_half


def test_it_waits_for_half_of_the_trials_and_for_one_that_has_completed(tmp_path: Path) -> None:
    study, storage = load_study(ROOT / "tests" / "support" / "studies" / "narrow.py"), str(tmp_path / "study.journal")
    known = optuna.create_study(storage=open_storage(storage), study_name="narrow")

    def add(state: TrialState, value: float | None = None, **more: Any) -> None:
        known.add_trial(create_trial(state=state, value=value, **more))

    add(TrialState.PRUNED)
    add(TrialState.RUNNING)
    add(TrialState.WAITING)
    assert spent(known) == 1
    add(TrialState.WAITING, user_attrs={MILESTONE: 1}, intermediate_values={1: 0.5})  # waits for its promotion
    add(TrialState.FAIL)
    assert spent(known) == 3
    heard: Queue[str] = Queue()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait_for_half, study, storage, "narrow", heard.put)
        said = heard.get(timeout=30)
        assert said == "3 of the 6 trials of study narrow have ended; the target begins after 3, one of them completed"
        assert not waiting.done()
        add(TrialState.COMPLETE, 0.5)
        waiting.result(timeout=30)
    assert heard.empty()
    wait_for_half(study, storage, "narrow", heard.put)
    assert heard.empty()


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """A study of four surrogates, of which the second is the best."""
    file, storage = ROOT / "tests" / "support" / "studies" / "narrow.py", str(tmp_path / "study.journal")
    known = optuna.create_study(storage=open_storage(storage), study_name="narrow", direction="maximize")
    rates = {"lr": optuna.distributions.FloatDistribution(1e-4, 1e-1, log=True)}
    for score in (0.6, 0.9, 0.8, 0.7):
        params, scored = {"lr": score / 10}, {1: 0.5, 2: score}
        known.add_trial(create_trial(value=score, params=params, distributions=rates, intermediate_values=scored))
    return Source(study=load_study(file), file=file, storage=storage, name="narrow", directory=tmp_path)


def test_pruned_trials_are_not_confirmed_but_have_cost_epochs(source: Source) -> None:
    assert confirm(source, 1, None, 3) is None, "half of 8 epochs are less than 3 seeds of 2 epochs take"
    known = optuna.load_study(study_name="narrow", storage=open_storage(source.storage))
    for _ in range(16):
        known.add_trial(create_trial(state=TrialState.PRUNED, value=1.0, intermediate_values={1: 1.0}))
    begun = confirm(source, 1, None, 3)
    assert begun is not None and begun[1] == [1, 2]
    assert [each.user_attrs[CONFIRMS] for each in confirming(source)] == ["narrow#1", "narrow#2"] * 3
    again = confirm(source, 1, 3, 4)  # a further surrogate, and a further seed
    assert again is not None and again[1] == [1, 2, 3]
    added = [each.user_attrs[CONFIRMS] for each in confirming(source)[6:]]
    assert added == ["narrow#3"] * 3 + ["narrow#1", "narrow#2", "narrow#3"]


def test_a_study_of_the_same_name_confirms_nothing_of_another(source: Source) -> None:
    old = source.opened("confirm")
    old.enqueue_trial({"lr": 0.0123}, user_attrs={CONFIRMS: "narrow#1"})
    trial = old.ask()
    trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    old.tell(trial, 1e9)
    confirm(source, 1, 2, 1)
    assert [each.user_attrs[CONFIRMS] for each in confirming(source)[1:]] == ["narrow#1", "narrow#2"]
    assert confirmed(source) == []
    for score in (0.5, 0.55):
        old.tell(old.ask(), score)
    assert [(each.trial.number, each.scores) for each in confirmed(source)] == [(1, [[0.5]]), (2, [[0.55]])]


def test_surrogates_that_are_trained_again_have_seeds_that_the_search_has_not(source: Source) -> None:
    begun = confirm(source, 1, 2, 2)
    assert begun is not None
    study, params = load_study(begun[0].file), {"lr": 0.01}
    weights = [build_member(study, number, params).model.get_parameter("0.weight") for number in (0, 2, 0)]
    assert weights[0].shape == (32, 20) and torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[1])
    for number in range(source.study.trials):
        other = build_member(source.study, number, params).model.get_parameter("0.weight")
        assert not torch.equal(weights[0], other) and not torch.equal(weights[1], other)


def test_surrogates_that_are_trained_again_share_their_seeds_also_with_those_that_come_later(source: Source) -> None:
    confirm(source, 1, 2, 2)
    begun = confirm(source, 1, 3, 3)  # a further surrogate, and a further seed
    assert begun is not None
    study = load_study(begun[0].file)
    drawn: dict[str, set[float]] = {}
    for trial in confirming(source):
        weight = build_member(study, trial.number, {"lr": 0.01}).model.get_parameter("0.weight")
        drawn.setdefault(trial.user_attrs[CONFIRMS], set()).add(weight.double().sum().item())
    assert [len(sums) for sums in drawn.values()] == [3, 3, 3]
    assert drawn["narrow#1"] == drawn["narrow#2"] == drawn["narrow#3"]


def test_a_surrogate_has_no_seed_twice_also_if_an_older_version_has_enqueued_it(source: Source) -> None:
    opened = source.opened("confirm")
    for label in ("narrow#1", "narrow#2") * 2:  # their numbers were their seeds
        opened.enqueue_trial({"lr": 0.09 if label == "narrow#1" else 0.08}, user_attrs={CONFIRMS: label})
    begun = confirm(source, 1, 2, 4)
    assert begun is not None
    study, seeds = load_study(begun[0].file), dict[str, set[int]]()
    for trial in confirming(source):
        seeds.setdefault(trial.user_attrs[CONFIRMS], set()).add(study.seed({}, trial.number) - FIRST_SEED)
    assert seeds == {"narrow#1": {0, 1, 2, 3}, "narrow#2": {0, 1, 2, 3}}


OWN_SETTINGS = """
from narrow import Narrow

class Own(Narrow):
    def __init__(self):
        self.trials, self.rungs, self.search, self.keep_best = 50, (1,), "asha", 5
"""


def test_what_a_study_sets_as_it_is_made_does_not_reach_those_that_are_made_of_it(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(source.file.parent))
    file = tmp_path / "own.py"
    file.write_text(OWN_SETTINGS)
    own = replace(source, study=load_study(file), file=file)
    begun = confirm(own, 1, 2, 1)
    assert begun is not None
    for made, kept in ((begun[0], 0), (prepare(own, unconfirmed(own.best()[:2])).made, 2)):
        study = load_study(made.file)
        assert (study.trials, study.rungs, study.search, study.keep_best) == (2, (), None, kept)


def confirming(source: Source) -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(study_name="narrow-confirm", storage=open_storage(source.storage)).get_trials()


def test_there_must_be_a_study(tmp_path: Path) -> None:
    study = load_study(ROOT / "tests" / "support" / "studies" / "narrow.py")
    with pytest.raises(NoStudyError, match="there is no study narrow; found: none"):
        wait_for_half(study, str(tmp_path / "study.journal"), "narrow", print)
