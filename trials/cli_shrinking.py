"""The sub-commands of `trials` about surrogates. As those in `cli`, they import torch and Optuna when they run."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_hooks.shared.renamed_commands import refuse

if TYPE_CHECKING:
    from trials.study import Study

PROGRAM = "trials"


def shrink(parsed: argparse.Namespace, study: "Study") -> int:
    """Print what shrinking does to a study's model."""
    from trials.surrogates import described, lines_of

    found = _tried(parsed, lambda: described(study, parsed.scale))
    print(json.dumps(found) if parsed.json else "\n".join(lines_of(found)))
    return 0


def add_shrink(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("--scale", type=int, metavar="S", help="how many times narrower; default: the study's")
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")


def rank(parsed: argparse.Namespace, study: "Study") -> int:
    """Print how well surrogates rank random configurations."""
    from trials.surrogates import ranking

    found = _tried(parsed, lambda: ranking(study, parsed.scales, parsed.configurations))
    if parsed.json:
        print(json.dumps(found))
        return 0
    print(f"{parsed.configurations} random configurations, trained at full size and as surrogates:")
    for scale, own in found["scales"].items():
        print(f"÷ {scale}: rank correlation {own['spearman']:.2f}; the best surrogate's regret {own['regret']:.4g}")
    return 0


def add_rank(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("--scales", type=int, nargs="+", default=[2, 4, 8], metavar="S", help="default: 2 4 8")
    parser.add_argument("--configurations", type=int, default=12, metavar="N", help="how many to train; default: 12")
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")


def transfer(parsed: argparse.Namespace, study: "Study", place: tuple[str, Path, str]) -> int:
    """Train a study's target with the hyperparameters of its best surrogates."""
    from ds_hooks.shared.endings import USER_ERROR_STATUS
    from ds_hooks.shared.study_files import trials_directory
    from trials.run import RunConfig, run
    from trials.transfer import lines_for_a_script, prepare

    name, _, storage = place
    prepared = _tried(parsed, lambda: prepare(study, parsed.study, storage, name, parsed.directory, parsed.top))
    print(f"study {prepared.name}: the target, with the hyperparameters of trials {prepared.sources} of {name}")
    for line in lines_for_a_script(prepared.zeroed):
        print(f"In a script of your own, before the training: {line}")
    directory = trials_directory(parsed.directory, prepared.name)
    config = RunConfig(
        study=prepared.file,
        name=prepared.name,
        storage=storage,
        directory=directory,
        device=parsed.device,
        threads=parsed.threads,
        workers=1,
    )
    outcome = run(config)
    if outcome.lines and outcome.status != USER_ERROR_STATUS:
        print(*outcome.lines, sep="\n")
    if outcome.status == 0 and parsed.save is not None:
        _save(parsed, prepared.file, prepared.name, storage, directory)
    return outcome.status


def add_transfer(parser: argparse.ArgumentParser) -> None:
    """Its options, beside those of the place."""
    parser.add_argument("--top", type=_from_one, default=3, metavar="K", help="train with the best K; default: 3")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: the first visible one")
    parser.add_argument("--threads", type=_from_one, default=1, metavar="N", help="torch's threads; default: 1")
    parser.add_argument("--save", type=Path, metavar="DIR", help="write hyperparameters and weights there")


def _save(parsed: argparse.Namespace, file: Path, name: str, storage: str, directory: Path) -> None:
    from trials.best_trials import best_trials, describe, save

    found = _tried(parsed, lambda: [save(each, file, parsed.save) for each in best_trials(storage, name, directory)])
    print("\n".join(line for each in found for line in describe(each)))


def _tried(parsed: argparse.Namespace, do: Callable[[], Any]) -> Any:
    try:
        return do()
    except Exception as error:  # the study is the user's code: anything may come
        refuse(f"{PROGRAM} {parsed.command}", f"{parsed.study}: {type(error).__name__}: {error}")


def _from_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value
