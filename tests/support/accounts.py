"""The accounts of a study: what its workers have trained, and what of that counts."""

from collections.abc import Sequence

from optuna.trial import FrozenTrial

from trials.search.storage.claims import Span


def assert_accounts(spans: Sequence[Span], trials: Sequence[FrozenTrial]) -> None:
    """What is kept covers each trial's epochs once."""
    assert any(span.kept for span in spans), "there is something to account for"
    for trial in trials:
        kept = sorted((span.from_epoch, span.to_epoch) for span in spans if span.trial == trial.number and span.kept)
        ends = [0, *(to for _, to in kept)]
        assert [begin for begin, _ in kept] == ends[:-1], f"trial {trial.number}: {kept}"
        if trial.intermediate_values:
            assert ends[-1] == max(trial.intermediate_values)
