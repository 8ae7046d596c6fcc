"""The `trials` command. torch and Optuna are imported only by the sub-commands that need them."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ds_hooks.shared import logs
from ds_hooks.shared.command_line import Command, complete_paths, make_parser, refuse_unknown_command
from ds_hooks.shared.renamed_commands import refuse
from ds_hooks.shared.secrets import STORAGE_VARIABLE, hide_password, hide_passwords

if TYPE_CHECKING:
    from trials.study import Study

PROGRAM = "trials"
DESCRIPTION = "Trains many hyperparameter trials as one model."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one sub-command; returns the exit status. A mistake of the user's ends with one clear line and status 2."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    refuse_unknown_command(PROGRAM, words, [command.name for command in COMMANDS])
    logs.set_up()
    parsed = make_parser(PROGRAM, DESCRIPTION, COMMANDS, _PrintCompletion).parse_args(words)
    status: int = parsed.run(parsed)
    return status


def _check(parsed: argparse.Namespace) -> int:
    from trials.explain import check

    return _print_lines(parsed, check)


def _explain(parsed: argparse.Namespace) -> int:
    from trials.explain import explain

    return _print_lines(parsed, explain)


def _add_study(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("study", type=Path, metavar="STUDY", help="a Python file that defines one study")


def _print_lines(parsed: argparse.Namespace, examine: "Callable[[Study], list[str]]") -> int:
    study = _load(parsed)
    try:
        lines = examine(study)
    except Exception as error:  # the study is the user's code: anything may come
        _refuse_study(parsed, error)
    print("\n".join(lines))
    return 0


def _measure(parsed: argparse.Namespace) -> int:
    import torch

    from trials.side_task.devices import SideDeviceError, make_side_device
    from trials.training.rehearsal import measure_dedicated

    torch.set_num_threads(parsed.threads)
    study = _load(parsed)
    trials = parsed.trials or min(study.fused, study.trials)
    try:
        make_side_device(parsed.device, 1.0).adopt(study)
        measured = measure_dedicated(study, trials, parsed.seconds)
    except SideDeviceError as error:
        refuse(f"{PROGRAM} measure", error)
    except Exception as error:  # the study is the user's code: anything may come
        _refuse_study(parsed, error)
    if parsed.json:
        print(json.dumps(measured))
    else:
        print(f"{measured['trials']} trials fused: {measured['work_per_s']:.0f} trial-samples per second")
    return 0


def _add_measure(parser: argparse.ArgumentParser) -> None:
    _add_study(parser)
    parser.add_argument("--seconds", type=_positive(float), default=5.0, help="how long to train; default: 5")
    parser.add_argument(
        "--trials", type=_positive(int), metavar="K", help="how many trials to fuse; default: the study's"
    )
    parser.add_argument("--threads", type=_positive(int), default=1, metavar="N", help="torch's threads; default: 1")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: the first visible one")
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")


def _close(parsed: argparse.Namespace) -> int:
    from trials.search.close import close_study

    logs.adopt("optuna")
    if "://" not in parsed.storage and not Path(parsed.storage).is_file():  # Optuna would make a new one
        refuse(f"{PROGRAM} close", f"no journal {parsed.storage}; allowed: a journal's path or a database's URL")
    try:
        ended = close_study(parsed.storage, parsed.study_name, parsed.reason)
    except Exception as error:  # of any of many database drivers
        refuse(f"{PROGRAM} close", hide_passwords(f"{hide_password(parsed.storage)}: {type(error).__name__}: {error}"))
    print(f"{ended} unfinished trial{'s' * (ended != 1)} of {parsed.study_name} ended as failed: {parsed.reason}")
    return 0


def _add_close(parser: argparse.ArgumentParser) -> None:
    named = os.environ.get(STORAGE_VARIABLE)
    described = f"Optuna's journal, or a database's URL; default: ${STORAGE_VARIABLE}, which other users cannot see"
    parser.add_argument("--storage", default=named, required=named is None, metavar="FILE", help=described)
    parser.add_argument("--study-name", required=True, metavar="NAME", help="Optuna's name of the study")
    parser.add_argument("--reason", default="the run ended", metavar="TEXT", help="recorded with each trial")


def _positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = kind(text)
        if not value > 0:
            raise ValueError
        return value

    parse.__name__ = f"positive {kind.__name__}"  # argparse names it in its error
    return parse


def _load(parsed: argparse.Namespace) -> "Study":
    from trials.study import StudyError, load_study

    try:
        study = load_study(parsed.study)
    except StudyError as error:
        refuse(f"{PROGRAM} {parsed.command}", error)
    return study


def _refuse_study(parsed: argparse.Namespace, error: Exception) -> NoReturn:
    refuse(f"{PROGRAM} {parsed.command}", f"{parsed.study}: {type(error).__name__}: {error}")


class _PrintCompletion(argparse.Action):
    """Prints a static script: pressing TAB never starts Python."""

    def __call__(self, parser: argparse.ArgumentParser, _namespace: Any, shell: Any, _option: Any = None) -> NoReturn:
        import shtab

        complete_paths(parser, shtab.FILE, shtab.DIRECTORY)
        print(shtab.complete(parser, shell))
        parser.exit()


COMMANDS = (
    Command(
        name="check",
        summary="try a study before a run: train one epoch of two trials, and score them",
        example="trials check examples/digits.py",
        run=_check,
        add_arguments=_add_study,
    ),
    Command(
        name="explain",
        summary="print how each layer is fused, and why",
        example="trials explain examples/digits.py",
        run=_explain,
        add_arguments=_add_study,
    ),
    Command(
        name="measure",
        summary="train a study alone on a device, and print its rate",
        example="trials measure examples/digits.py --seconds 5",
        run=_measure,
        add_arguments=_add_measure,
    ),
    Command(
        name="close",
        summary="end a study for good: mark its unfinished trials as failed",
        example="trials close --storage runs/demo/study/study.journal --study-name digits",
        run=_close,
        add_arguments=_add_close,
    ),
)
