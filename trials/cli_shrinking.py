"""The sub-commands of `trials` about surrogates. As those in `cli`, they import torch and Optuna when they run."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_hooks.shared.command_line import positive, refuse_command, typed_path
from trials.cli_options import add_device, add_save, add_threads
from trials.own_logger import own_logger

if TYPE_CHECKING:
    from trials.best_trials import Shown
    from trials.confirmation import Choice
    from trials.study import Study
    from trials.transfer import Made, Source

LINE_EVERY_S = 10.0
"""How often a line tells how far it is, where there is no terminal."""

log = own_logger(__name__)


def shrink(parsed: argparse.Namespace, study: "Study") -> int:
    """Print what shrinking does to a study's model."""
    from trials.surrogates import described, lines_of

    found = _tried(parsed, lambda: described(study, parsed.scale))
    print(json.dumps(found) if parsed.json else "\n".join(lines_of(found)))
    if parsed.coordinates is not None:
        _draw_coordinates(parsed, study)
    return 0


def _draw_coordinates(parsed: argparse.Namespace, study: "Study") -> None:
    from trials.coordinates import coordinates, svg

    moved = _tried(parsed, lambda: coordinates(study, parsed.scale))
    try:
        parsed.coordinates.write_text(svg(moved), encoding="utf-8")
    except OSError as error:
        refuse_command(parsed, f"--coordinates {parsed.coordinates}: {error.strerror or error}")
    steep = moved.steep()
    for layer, slope in steep.items():
        print(
            f"warning: activations of '{layer}' move by width^{slope:+.2f}, so rates may not transfer; allowed: a "
            "narrower range of rates, or another scale",
            file=sys.stderr,
        )
    flat = "" if steep else "; activations move alike at all widths"
    print(f"coordinate check: {parsed.coordinates}{flat}", file=sys.stderr)


def add_shrink(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("--scale", type=int, metavar="S", help="how many times narrower; default: the study's")
    described = "train a few steps at several widths, and draw how far activations move, as SVG"
    parser.add_argument("--coordinates", type=typed_path, metavar="FILE", help=described)
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")


def rank(parsed: argparse.Namespace, study: "Study") -> int:
    """Print how well surrogates rank random configurations."""
    from trials.surrogates import ranking

    with _Progress(parsed.configurations * (1 + len(parsed.scales))) as progress:
        found = _tried(parsed, lambda: ranking(study, parsed.scales, parsed.configurations, progress.tell))
    if parsed.json:
        print(json.dumps(found))
        return 0
    print(f"{parsed.configurations} random configurations, trained at full size and as surrogates:")
    for scale, own in found["scales"].items():
        print(f"÷ {scale}: rank correlation {own['spearman']:.2f}; the best surrogate's regret {own['regret']:.4g}")
    return 0


class _Progress:
    """A progress bar of trials on the standard error stream; lines where there is no terminal."""

    def __init__(self, trials: int) -> None:
        from tqdm import tqdm

        self._trials = trials
        self._bar: Any = tqdm(total=trials, unit="trial", disable=None, dynamic_ncols=True, file=sys.stderr)
        self._said_s = time.monotonic()

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def tell(self, done: float, what: str) -> None:
        """See `surrogates.Tell`."""
        self._bar.set_postfix_str(what, refresh=False)
        self._bar.update(int(done) - self._bar.n)
        if self._bar.disable and time.monotonic() >= self._said_s + LINE_EVERY_S:
            self._said_s = time.monotonic()
            log.info("%d of %d trials have trained; now: %s", done, self._trials, what)


def add_rank(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("--scales", type=int, nargs="+", default=[2, 4, 8], metavar="S", help="default: 2 4 8")
    parser.add_argument(
        "--configurations", type=positive(int), default=12, metavar="N", help="how many to train; default: 12"
    )
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")


def transfer(parsed: argparse.Namespace, study: "Study", location: tuple[str, Path, str]) -> int:
    """Train a study's target with the hyperparameters of its best surrogates."""
    from trials.run import INTERRUPTED_STATUS
    from trials.search.optuna_study import known_study
    from trials.transfer import Source, lines_for_a_script, prepare, spent, wait_for_half

    name, _, storage = location
    if parsed.eager:
        try:
            _tried(parsed, lambda: wait_for_half(study, storage, name, _say))
        except KeyboardInterrupt:
            return INTERRUPTED_STATUS
    source = Source(study=study, file=parsed.study, storage=storage, name=name, directory=parsed.directory)
    status, choices = _chosen(parsed, source)
    if status:
        return status
    prepared = _tried(parsed, lambda: prepare(source, choices))
    _say(f"study {prepared.made.name}: the target, with the hyperparameters of these trials of {name}:")
    for each in choices:
        _say(f"  trial {each.trial.number}: {each.why}")
    for line in lines_for_a_script(prepared.zeroed):
        _say(f"In your own script, before training: {line}")
    status = _train(parsed, prepared.made, storage)
    if status == 0:
        _tell_the_target(parsed, study, prepared.made.name, storage)
        done = spent(known_study(storage, name))
        if done < study.trials:
            ended = f"{done} of the {study.trials} trials of study {name} have ended"
            print(f"{ended}; once all have, run the same command again to train with any that are better")
    return status


def _chosen(parsed: argparse.Namespace, source: "Source") -> "tuple[int, list[Choice]]":
    """The surrogates for the target, and the exit status of the training that has chosen them."""
    from trials.confirmation import choose, unconfirmed
    from trials.transfer import confirm, confirmed

    begun = None
    if parsed.confirm != 0:
        begun = _tried(parsed, lambda: confirm(source, parsed.top, parsed.confirm, parsed.seeds))
    if begun is None:
        if parsed.confirm != 0:
            _say(f"too few trials of {source.name} have completed, or too few epochs were trained, to confirm any")
        return 0, unconfirmed(_tried(parsed, source.best)[: parsed.top])
    made, numbers = begun
    _say(f"study {made.name}: trials {numbers} of {source.name} again, each with {parsed.seeds} further seeds")
    if not made.is_over and (status := _train(parsed, made, source.storage)):
        return status, []
    chosen = choose(_tried(parsed, lambda: confirmed(source)), source.directions, parsed.top)
    return 0, chosen or unconfirmed(_tried(parsed, source.best)[: parsed.top])  # none, if others still train them


def _whole(text: str) -> int:
    """The type of an argument that is 0 or a positive number."""
    value = int(text)
    if value < 0:
        raise ValueError
    return value


_whole.__name__ = "whole number"  # argparse names it in its error


def _train(parsed: argparse.Namespace, made: "Made", storage: str) -> int:
    """Train a study that was made of the user's. Returns the exit status."""
    from ds_hooks.shared.processes.endings import USER_ERROR_STATUS
    from ds_hooks.shared.study_paths import trials_directory
    from trials.run import RunConfig, run

    config = RunConfig(
        study=made.file,
        name=made.name,
        storage=storage,
        directory=trials_directory(parsed.directory, made.name),
        device=parsed.device,
        threads=parsed.threads,
        workers=1,
    )
    outcome = run(config)
    if outcome.lines and outcome.status != USER_ERROR_STATUS:
        _say("\n".join(outcome.lines))
    return outcome.status


def _say(text: str) -> None:
    """Print it at once: what follows takes long."""
    print(text, flush=True)


def add_transfer(parser: argparse.ArgumentParser) -> None:
    """Its options, beside those of the location."""
    parser.add_argument("--top", type=positive(int), default=3, metavar="K", help="train with the best K; default: 3")
    described = "train the best N surrogates again, and choose K of them; 0: choose by the search; default: up to 16"
    parser.add_argument("--confirm", type=_whole, metavar="N", help=described)
    parser.add_argument(
        "--seeds", type=positive(int), default=3, metavar="S", help="with S further seeds each; default: 3"
    )
    described = "begin once half of the surrogates' trials have ended, while the others train in bubbles"
    parser.add_argument("--eager", action="store_true", help=described)
    add_device(parser)
    add_threads(parser)
    add_save(parser)


def _tell_the_target(parsed: argparse.Namespace, study: "Study", name: str, storage: str) -> None:
    """Print the best of the target's trials, and how to load it."""
    from ds_hooks.shared.study_paths import trials_directory
    from trials.best_trials import best_trials, describe, loading, save

    def find() -> "list[Shown]":
        return best_trials(storage, name, trials_directory(parsed.directory, name))

    keep = find if parsed.save is None else lambda: save(find, study, parsed.study, parsed.save)
    found = _tried(parsed, keep)
    print("\n".join(line for each in found for line in describe(each)))
    print(f"\n{loading(study, parsed.study, found[0])}")


def _tried(parsed: argparse.Namespace, do: Callable[[], Any]) -> Any:
    from trials.search.optuna_study import NoStudyError
    from trials.transfer import NothingToTransferError

    try:
        return do()
    except (NoStudyError, NothingToTransferError) as error:
        refuse_command(parsed, error)
    except Exception as error:  # the study is the user's code: anything may come
        refuse_command(parsed, f"{parsed.study}: {type(error).__name__}: {error}")
