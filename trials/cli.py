"""The `trials` command. torch and Optuna are imported only by the sub-commands that need them."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

from ds_hooks.shared import logs
from ds_hooks.shared.command_line import (
    STUDY_HELP,
    Command,
    make_parser,
    positive,
    print_anything,
    refuse_command,
    refuse_unknown_command,
    run_command,
    typed_path,
)
from ds_hooks.shared.processes.endings import USER_ERROR_STATUS
from ds_hooks.shared.secrets import STORAGE_VARIABLE
from trials import cli_shrinking
from trials.cli_options import (
    PROGRAM,
    STORAGES,
    add_device,
    add_location,
    add_save,
    add_threads,
    again,
    known_location,
    known_storage,
    location_of,
    refuse_storage,
    storage_of,
)
from trials.late_compiler import load_compiler_late
from trials.study_error import NO_FILE

if TYPE_CHECKING:
    from trials.study import Study


DESCRIPTION = "Train many hyperparameter trials as one model."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one sub-command; returns the exit status. A mistake of the user's ends with one clear line and status 2."""
    print_anything()
    words = list(sys.argv[1:] if arguments is None else arguments)
    refuse_unknown_command(PROGRAM, words, [command.name for command in COMMANDS])
    logs.set_up()
    load_compiler_late()
    return run_command(make_parser(PROGRAM, DESCRIPTION, COMMANDS, _shtab).parse(words))


def _check(parsed: argparse.Namespace) -> int:
    from trials.explain import check

    return _print_lines(parsed, check)


def _explain(parsed: argparse.Namespace) -> int:
    from trials.explain import explain

    return _print_lines(parsed, explain)


def _add_study(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("study", type=typed_path, metavar="STUDY", help=STUDY_HELP)


def _add_examined(parser: argparse.ArgumentParser) -> None:
    _add_study(parser)
    add_device(parser)


def _print_lines(parsed: argparse.Namespace, examine: "Callable[[Study], list[str]]") -> int:
    from trials.side_task.devices import SideDeviceError, make_side_device

    study = _load(parsed)
    try:
        make_side_device(parsed.device, 1.0).adopt(study)
        lines = examine(study)
    except SideDeviceError as error:
        refuse_command(parsed, error)
    except Exception as error:  # the study is the user's code: anything may come
        _refuse_study(parsed, error)
    print("\n".join(lines))
    return 0


def _measure(parsed: argparse.Namespace) -> int:
    import torch

    from trials.side_task.devices import SideDeviceError, make_side_device
    from trials.training.most_fused import MostFused, describe
    from trials.training.rehearsal import how_many, measure_dedicated

    torch.set_num_threads(parsed.threads)
    study = _load(parsed)
    try:
        make_side_device(parsed.device, 1.0).adopt(study)
        found = MostFused(parsed.trials) if parsed.trials else how_many(study)
        measured = measure_dedicated(study, min(found.trials, study.trials), parsed.seconds)
    except SideDeviceError as error:
        refuse_command(parsed, error)
    except Exception as error:  # the study is the user's code: anything may come
        _refuse_study(parsed, error)
    if parsed.json:
        print(json.dumps(measured))
    else:
        print(f"{measured['trials']} trials fused: {measured['work_per_s']:.0f} trial-samples per second")
        if found.gain:
            print(f"chosen by measurement: {describe(found)}")
    return 0


def _add_measure(parser: argparse.ArgumentParser) -> None:
    _add_study(parser)
    parser.add_argument("--seconds", type=positive(float), default=5.0, help="how long to train; default: 5")
    parser.add_argument(
        "--trials", type=positive(int), metavar="K", help="how many trials to fuse; default: the study's"
    )
    add_threads(parser)
    add_device(parser)
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")


def _close(parsed: argparse.Namespace) -> int:
    from trials.search.close import close_study
    from trials.search.optuna_study import NoStudyError

    storage = known_storage(parsed, storage_of(parsed))
    try:
        ended = close_study(storage, parsed.study_name, parsed.reason)
    except NoStudyError as error:
        refuse_command(parsed, error)
    except Exception as error:  # of any of many database drivers
        refuse_storage(parsed, storage, error)
    failed = f"{ended.failed} unfinished trial{'s' * (ended.failed != 1)} of {parsed.study_name} ended as failed"
    pruned = f", {ended.pruned} paused as pruned" if ended.pruned else ""
    print(f"{failed}{pruned}: {parsed.reason}")
    return 0


def _add_close(parser: argparse.ArgumentParser) -> None:
    default = f"env:{STORAGE_VARIABLE}" if STORAGE_VARIABLE in os.environ else None
    described = f"{STORAGES}; default: env:{STORAGE_VARIABLE}"
    parser.add_argument("--storage", default=default, required=default is None, metavar="WHERE", help=described)
    parser.add_argument("--study-name", required=True, metavar="NAME", help="the study's name in Optuna")
    parser.add_argument("--reason", default="the run ended", metavar="TEXT", help="recorded with each trial")


def _run(parsed: argparse.Namespace) -> int:
    from trials.run import RunConfig, run

    logs.adopt("optuna")
    name, directory, storage = location_of(parsed)
    if not parsed.study.is_file():
        refuse_command(parsed, f"{parsed.study}: {NO_FILE}")
    config = RunConfig(
        study=parsed.study,
        name=name,
        storage=storage,
        directory=directory,
        device=parsed.device,
        threads=parsed.threads,
        workers=parsed.workers,
    )
    try:
        outcome = run(config)
    except OSError as error:
        refuse_command(parsed, f"{error.filename or directory}: {error.strerror or error}")
    if outcome.lines and outcome.status != USER_ERROR_STATUS:
        print(*outcome.lines, *([f"Next: {PROGRAM} best {again(parsed)}"] if outcome.has_best else []), sep="\n")
    return outcome.status


def _add_run(parser: argparse.ArgumentParser) -> None:
    _add_study(parser)
    add_location(parser)
    add_device(parser, "a device for each worker")
    add_threads(parser)
    parser.add_argument("--workers", type=positive(int), default=1, metavar="N", help="processes; default: 1")


def _best(parsed: argparse.Namespace) -> int:
    from trials.best_trials import NoTrialError, about_surrogates, best_trials, describe, loading, save
    from trials.search.optuna_study import NoStudyError

    name, directory, storage = known_location(parsed)
    try:
        found = best_trials(storage, name, directory)
        with _working_directory():
            study = _loaded(parsed)
        if parsed.save is not None:
            found = save(lambda: best_trials(storage, name, directory), study, parsed.study, parsed.save)
    except (NoStudyError, NoTrialError) as error:
        refuse_command(parsed, error)
    except OSError as error:
        refuse_command(parsed, f"{error.filename or parsed.save}: {error.strerror or error}")
    except Exception as error:  # of any of many database drivers
        refuse_storage(parsed, storage, error)
    print("\n".join(line for each in found for line in describe(each)))
    print(f"\n{loading(study, parsed.study, found[0])}")
    about = about_surrogates(study, found[0])
    if about:
        print("", *about, f"Next: {PROGRAM} transfer {again(parsed)}", sep="\n")
    return 0


def _add_best(parser: argparse.ArgumentParser) -> None:
    _add_study(parser)
    add_location(parser)
    add_save(parser)


def _deadline(parsed: argparse.Namespace) -> int:
    from trials.search.choice.deadline import DeadlineError
    from trials.search.deadline_outlook import verdict_on
    from trials.search.optuna_study import NoStudyError

    with _working_directory():
        study = _load(parsed)
    name, directory, storage = known_location(parsed)
    try:
        verdict = verdict_on(study, storage, name, directory, parsed.by or study.deadline)
    except DeadlineError as error:
        refuse_command(parsed, f"--by {error}")
    except NoStudyError as error:
        refuse_command(parsed, error)
    except OSError as error:
        refuse_command(parsed, f"{error.filename or directory}: {error.strerror or error}")
    except Exception as error:  # of any of many database drivers
        refuse_storage(parsed, storage, error)
    print(verdict.text)
    return {True: 0, False: 1, None: 2}[verdict.is_admitted]


def _add_deadline(parser: argparse.ArgumentParser) -> None:
    _add_study(parser)
    add_location(parser)
    described = "such as '2099-12-31 08:00', local or with a zone; default: the study's own deadline, if it has one"
    parser.add_argument("--by", metavar="TIME", help=described)


def _shrink(parsed: argparse.Namespace) -> int:
    return cli_shrinking.shrink(parsed, _load(parsed))


def _add_shrink(parser: argparse.ArgumentParser) -> None:
    _add_study(parser)
    cli_shrinking.add_shrink(parser)


def _rank(parsed: argparse.Namespace) -> int:
    return cli_shrinking.rank(parsed, _load(parsed))


def _add_rank(parser: argparse.ArgumentParser) -> None:
    _add_study(parser)
    cli_shrinking.add_rank(parser)


def _transfer(parsed: argparse.Namespace) -> int:
    with _working_directory():
        study = _load(parsed)
    return cli_shrinking.transfer(parsed, study, known_location(parsed))


def _add_transfer(parser: argparse.ArgumentParser) -> None:
    _add_study(parser)
    add_location(parser)
    cli_shrinking.add_transfer(parser)


def _load(parsed: argparse.Namespace) -> "Study":
    from trials.study import load_study
    from trials.study_error import StudyError

    try:
        study = load_study(parsed.study)
    except StudyError as error:
        refuse_command(parsed, error)
    return study


def _loaded(parsed: argparse.Namespace) -> "Study | None":
    """The study; None if its file is elsewhere, or cannot be loaded: its trials can be shown nevertheless."""
    from trials.study import load_study
    from trials.study_error import StudyError

    try:
        return load_study(parsed.study)
    except StudyError as error:
        if parsed.study.is_file():
            print(f"{parsed.program}: {error}", file=sys.stderr)
        return None


def _working_directory() -> contextlib.chdir[str]:
    """Keep it where paths on the command line are still to be used: a file that defines a study may change it."""
    return contextlib.chdir(".")


def _refuse_study(parsed: argparse.Namespace, error: Exception) -> NoReturn:
    refuse_command(parsed, f"{parsed.study}: {type(error).__name__}: {error}")


def _shtab() -> ModuleType:
    import shtab

    return shtab


COMMANDS = (
    Command(
        name="check",
        summary="try a study before a run: train one epoch of two trials, and score them",
        example="trials check examples/digits.py",
        run=_check,
        add_arguments=_add_examined,
    ),
    Command(
        name="explain",
        summary="print how each layer is fused, and why",
        example="trials explain examples/digits.py",
        run=_explain,
        add_arguments=_add_examined,
    ),
    Command(
        name="measure",
        summary="train a study alone on a device, and print its rate",
        example="trials measure examples/digits.py --seconds 5",
        run=_measure,
        add_arguments=_add_measure,
    ),
    Command(
        name="run",
        summary="train a study without a main job, on a device of its own",
        example="trials run examples/digits.py",
        run=_run,
        add_arguments=_add_run,
    ),
    Command(
        name="best",
        summary="show a study's best trials, and how to load their models",
        example="trials best examples/digits.py --save best",
        run=_best,
        add_arguments=_add_best,
    ),
    Command(
        name="deadline",
        summary="show when a study will end, and whether its deadline is admitted",
        example="trials deadline examples/digits.py --by '2099-12-31 08:00'",
        run=_deadline,
        add_arguments=_add_deadline,
    ),
    Command(
        name="shrink",
        summary="show how shrinking changes a study's model, and which hyperparameters transfer",
        example="trials shrink examples/shrunk_digits.py",
        run=_shrink,
        add_arguments=_add_shrink,
    ),
    Command(
        name="rank",
        summary="train random configurations at several scales, and compare their ranks",
        example="trials rank examples/shrunk_digits.py --scales 2 4",
        run=_rank,
        add_arguments=_add_rank,
    ),
    Command(
        name="transfer",
        summary="train a study's target with the hyperparameters of its best surrogates",
        example="trials transfer examples/shrunk_digits.py --top 1",
        run=_transfer,
        add_arguments=_add_transfer,
    ),
    Command(
        name="close",
        summary="end a study for good: mark its unfinished trials as failed",
        example="trials close --storage runs/demo/study/study.journal --study-name digits",
        run=_close,
        add_arguments=_add_close,
    ),
)
