"""Trains trials of all models in the zoo, and writes what became of them.

python -m tests.zoo.table        # docs/models.md
"""

import time
import warnings
from collections import Counter
from collections.abc import Iterator
from datetime import date

from tests.support.paths import ROOT
from tests.zoo.zoo import LIBRARIES, Outcome, cases, outcome, versions

PATH = ROOT / "docs" / "models.md"

HEAD = """# Models that were tried

Three trials of each model, with their own seeds and learning rates, took two steps and were scored: fused, and each
alone by plain PyTorch. Outputs, losses, gradients, weights, buffers and scores were compared. The models come from the
libraries, built small, with random weights.

    make test-zoo                    # the comparison
    python -m tests.zoo.table        # the comparison, and this document

Of {count} models, {equal} are equal but for rounding; {refused} refused, {different} different. {ways}.

{date}; {versions}.

| column | means |
|---|---|
| forward | by rules, or as a whole under `vmap` or in a loop over trials: [the ways](fusing.md#what-fuses) |
| by rule, by `vmap`, in a loop | how many layers, and calls between them, run in each way |
| difference | the largest one, as a share of what rounding explains; above 1 it would be an error |
| rounding of | the type whose rounding that is: of those that the model computes in, the finest that explains it |
| why not by rules | what keeps the forward from being traced |
"""

COLUMNS = ("model", "forward", "by rule", "by `vmap`", "in a loop", "difference", "rounding of", "why not by rules")

LONGEST = 110


def row(name: str, found: Outcome) -> str:
    """Return one model's line of the table."""
    layers, verdict = found.layers, found.verdict
    reason = found.reason.replace("|", "/").replace("TraceError: ", "").replace("\n", " ")
    reason = reason if len(reason) <= LONGEST else f"{reason[:LONGEST].rpartition(' ')[0]} …"
    sizes = ("", "") if verdict is None else (f"{verdict.share:.1g}", str(verdict.kind).removeprefix("torch."))
    counts = (str(layers[way] or "") for way in ("rule", "vmap", "loop"))
    return "| " + " | ".join((name, found.way, *counts, *sizes, reason)) + " |"


def table(found: dict[str, Outcome]) -> Iterator[str]:
    """Yield the lines of one library's table."""
    yield "| " + " | ".join(COLUMNS) + " |"
    yield "|" + "---|" * len(COLUMNS)
    yield from (row(name, each) for name, each in found.items())


def document(found: dict[str, dict[str, Outcome]]) -> str:
    """Return the whole document."""
    every = [each for own in found.values() for each in own.values()]
    verdicts = [each.verdict for each in every if each.verdict is not None]
    ways = Counter(each.way for each in every)
    head = HEAD.format(
        count=len(every),
        equal=sum(verdict.share <= 1 for verdict in verdicts),
        refused=len(every) - len(verdicts),
        different=sum(verdict.share > 1 for verdict in verdicts),
        ways=f"{ways['rules']} run by rules, {ways['vmap']} under `vmap`, {ways['loop']} in a loop",
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
            print(row(name, found[library][name]), f"{time.monotonic() - began:.1f} s", flush=True)
    PATH.write_text(document(found))


if __name__ == "__main__":
    main()
