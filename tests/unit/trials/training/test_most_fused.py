"""How many trials are fused is measured: as many as train fastest, and one where fusing does not pay."""

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR

from tests.support.paths import STUDIES
from trials.study import Study, load_study
from trials.training import most_fused
from trials.training.malloc import give_back_freed_memory, keep_freed_memory
from trials.training.most_fused import MostFused, choose, describe
from trials.training.rehearsal import how_many, rehearse


def steps(*took_s: float) -> dict[int, float]:
    return dict(zip((1, 2, 4, 8, 16), took_s, strict=False))


@pytest.mark.parametrize(
    ("took_s", "best"),
    [
        (steps(1e-3, 1e-3, 1e-3, 1e-3, 1e-3), (16, 16.0)),  # all overhead
        (steps(1e-3, 2e-3, 4e-3, 8e-3, 16e-3), (1, 1.0)),  # all arithmetic
        (steps(1e-3, 4e-3, 2e-3, 3e-3, 4e-3), (16, 4.0)),  # two are slow, as by a batched kernel, and more are not
        (steps(1e-3, 1e-3, 2e-3, 4e-3, 7.9e-3), (2, 2.0)),  # a gain of 1% is not worth eight times the memory
        (steps(0.5, 1.1), (1, 1.0)),  # no more are tried: the next step would take seconds
        (steps(0.2, 0.22, 0.40, 0.9), (4, 2.0)),
        (steps(0.2, 0.25, 0.32, 0.50, 0.9), (16, 3.2 / 0.9)),
    ],
)
def test_the_fastest_is_chosen(took_s: dict[int, float], best: tuple[int, float]) -> None:
    found = choose(took_s.__getitem__, most=16)
    assert (found.trials, found.gain) == (best[0], pytest.approx(best[1], rel=0.2))


def test_no_more_than_wanted_are_tried() -> None:
    tried: list[int] = []
    assert choose(lambda trials: tried.append(trials) or 1.0 / trials, most=6).trials == 6
    assert tried == [1, 2, 4, 6]


def test_what_does_not_fit_is_not_chosen() -> None:
    def step_s(trials: int) -> float:
        if trials > 4:
            raise MemoryError
        return 1e-3

    assert choose(step_s, most=16).trials == 4


def test_it_is_said_where_not_even_two_fit() -> None:
    def step_s(trials: int) -> float:
        if trials > 1:
            raise MemoryError
        return 1e-3

    found = choose(step_s, most=16)
    assert found == MostFused(1) and describe(found) == "two do not fit into memory"


def test_other_errors_pass() -> None:
    def step_s(trials: int) -> float:
        raise ValueError("no such batch")

    with pytest.raises(ValueError, match="no such batch"):
        choose(step_s, most=16)


def study_of(file: str, fused: int | str = "auto", trials: int = 100) -> Study:
    study = load_study(STUDIES / file)
    study.fused, study.trials = fused, trials
    return study


def test_small_models_are_fused(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    found = rehearse(study_of("tiny.py"))
    assert found.trials >= 8 and found.gain is not None and found.gain > 2
    assert f"trials that train at once: {found.trials} ({describe(found)})" in caplog.text


def test_models_that_fusing_makes_slower_train_one_by_one() -> None:
    found = rehearse(study_of("wide.py"))
    assert found == MostFused(1, 1.0) and describe(found) == "fused ones would train no faster than one after another"


def test_a_loader_is_asked_for_few_batches_and_draws_as_if_nothing_had_been_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    study, read = study_of("tiny.py"), list[int]()

    def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            read.append(epoch)
            yield torch.rand(16, 4), torch.rand(16, 1)

    vars(study)["batches"] = batches
    monkeypatch.setattr(most_fused, "ENOUGH_S", 0.02)
    before = torch.get_rng_state()
    assert how_many(study).trials > 1
    assert read == [0] * len(read) and len(read) <= 3 * 5, "three for each size"
    assert torch.equal(torch.get_rng_state(), before)


def test_schedulers_step_no_oftener_than_in_a_trial() -> None:
    study = study_of("tiny.py", trials=4)
    study.epochs, study.scheduler_every = 1, "step"
    vars(study)["scheduler"] = lambda params, optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
    assert how_many(study).gain is not None


@pytest.mark.filterwarnings("error")
def test_trials_that_are_pruned_before_they_begin_are_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    study = study_of("tiny.py", trials=4)

    def suggest(trial: optuna.Trial) -> dict[str, Any]:
        if trial.suggest_float("x", 0, 1) > 0.5:
            raise optuna.TrialPruned
        return {"lr": 0.1}

    vars(study)["suggest"] = suggest
    assert rehearse(study).gain is not None and "failed" not in caplog.text


@pytest.mark.parametrize(
    ("method", "does", "says"),
    [
        ("batches", lambda epoch: [], "the study gave no batches in epoch 0"),
        ("suggest", lambda trial: sys.exit(1), "SystemExit"),
    ],
)
def test_what_cannot_be_measured_is_said_in_words(
    method: str, does: Any, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    study = study_of("tiny.py")
    vars(study)[method] = does
    assert rehearse(study) == MostFused(16) and says in caplog.text


def test_freed_memory_is_given_back() -> None:
    keep_freed_memory()
    blocks = [torch.ones(1 << 18) for _ in range(256)]  # of 1 MiB
    del blocks[1::2], blocks[1]
    before = resident_bytes()
    give_back_freed_memory()
    assert resident_bytes() < before - (100 << 20)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(("fused", "trials", "rows"), [(3, 100, 3), ("auto", 1, 1)])
def test_what_the_study_says_counts(fused: int | str, trials: int, rows: int) -> None:
    study = study_of("wide.py", fused, trials)
    found = how_many(study)
    assert min(found.trials, trials) == rows and found.gain is None


def test_nothing_is_measured_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert how_many(study_of("wide.py")) == MostFused(16)


def test_a_study_that_fails_is_fused_as_usual(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = study_of("tiny.py")

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        raise ZeroDivisionError

    monkeypatch.setattr(study, "loss", loss)
    assert rehearse(study) == MostFused(16)
    assert "a rehearsal of Tiny failed: ZeroDivisionError" in caplog.text
