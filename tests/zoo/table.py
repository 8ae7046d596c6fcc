"""Trains trials of all models in the zoo, and writes what became of them.

python -m tests.zoo.table        # docs/models.md
"""

import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from datetime import date

import torch

from tests.support.paths import ROOT
from tests.zoo.zoo import LIBRARIES, Outcome, cases, outcome, versions

PATH = ROOT / "docs" / "models.md"

HEAD = """# Models that were tried

Of {count} models, {equal} give fused what they give alone, but for rounding; {refused} refused, {different} different.
The largest difference was {largest:.1g} of what rounding explains, in float64{others}.
{ways}.
Of their layers, and the calls between them, {layers}.

Three trials of each model, with their own seeds and learning rates, took two steps and were scored: fused, and each
alone by plain PyTorch. Outputs, losses, gradients, weights, buffers and scores were compared. The models come from the
libraries, built small, with random weights.

    make test-zoo                    # the comparison
    python -m tests.zoo.table        # the comparison, and this document

{date}; {versions}.

The way is that of the forward: by rules, or as a whole under `vmap` or in a loop over the trials
([the ways](fusing.md#what-fuses)). `trials explain` prints that of each layer in yours.
"""

WAYS = ("rules", "vmap", "loop", "refused")
"""In the order of the tables."""

LONGEST = 110


def why(found: Outcome) -> str:
    """Return what keeps a model from rules, in short; empty if nothing does."""
    reason = found.reason.replace("|", "/").replace("TraceError: ", "").replace("\n", " ")
    return reason if len(reason) <= LONGEST else f"{reason[:LONGEST].rpartition(' ')[0]} …"


def table(found: Mapping[str, Outcome]) -> Iterator[str]:
    """Yield the lines of one library's table: a row for each way and reason, those with the most models first."""
    models: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, each in found.items():
        models[each.way, why(each)].append(name)
    yield "| way | models | why not by rules |"
    yield "|---|---|---|"
    for (way, reason), names in sorted(models.items(), key=lambda row: (WAYS.index(row[0][0]), -len(row[1]))):
        yield f"| {way} | {'; '.join(names)} | {reason} |"


def document(found: Mapping[str, Mapping[str, Outcome]]) -> str:
    """Return the whole document."""
    every = [each for own in found.values() for each in own.values()]
    verdicts = [each.verdict for each in every if each.verdict is not None]
    coarser = [
        f"{name} in {str(each.verdict.kind).removeprefix('torch.')}"
        for own in found.values()
        for name, each in own.items()
        if each.verdict is not None and each.verdict.kind is not torch.float64
    ]
    ways = Counter(each.way for each in every)
    layers = sum((each.layers for each in every), Counter[str]())
    head = HEAD.format(
        count=len(every),
        equal=sum(verdict.share <= 1 for verdict in verdicts),
        refused=len(every) - len(verdicts),
        different=sum(verdict.share > 1 for verdict in verdicts),
        largest=max((verdict.share for verdict in verdicts), default=0.0),
        others=f" ({', '.join(coarser)})" if coarser else "",
        ways=f"{ways['rules']} run by rules, {ways['vmap']} under `vmap`, {ways['loop']} in a loop",
        layers=f"{layers['rule']:,} run by rule, {layers['vmap']:,} under `vmap`, {layers['loop']:,} in a loop",
        date=date.today().isoformat(),
        versions=versions(),
    )
    return "\n".join([head, *(line for name, own in found.items() for line in (f"## {name}", "", *table(own), ""))])


def main() -> None:
    """Write it."""
    warnings.simplefilter("ignore")
    found: dict[str, dict[str, Outcome]] = {}
    for library in LIBRARIES:
        found[library] = {}
        for name, case in cases(library).items():
            began = time.monotonic()
            found[library][name] = outcome(case)
            each = found[library][name]
            print(name, each.way, why(each), f"{time.monotonic() - began:.1f} s", flush=True)
    PATH.write_text(document(found))


if __name__ == "__main__":
    main()
