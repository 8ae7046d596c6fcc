"""Trials of models that people use are, fused, the trials alone; or they are refused, with a reason that holds."""

import re
from collections.abc import Iterator

import pytest

from tests.support.paths import ROOT
from tests.zoo.zoo import BLIND, LIBRARIES, MissingError, cases, outcome

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own


def models() -> Iterator[object]:
    for library in LIBRARIES:
        try:
            yield from (pytest.param(library, name, id=f"{library}: {name}") for name in cases(library))
        except MissingError as error:
            yield pytest.param(library, "", id=library, marks=pytest.mark.skip(reason=str(error)))


@pytest.mark.parametrize(("library", "name"), models())
def test_fused_trials_are_the_trials_alone(library: str, name: str) -> None:
    case = cases(library)[name]
    found = outcome(case)
    if case.refused:
        assert re.search(case.refused, found.refused), found
        return
    assert found.verdict is not None, found.refused
    verdict = found.verdict
    assert verdict.share <= 1, f"{verdict.worst} differs, by {verdict.share:.1e} times of what rounding explains"
    assert 0 < verdict.blind < BLIND, "nothing is computed, or rounding alone moves the loss too far"


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_document_names_each(library: str) -> None:
    text = (ROOT / "docs" / "models.md").read_text()
    section = text.partition(f"## {library}\n")[2].partition("\n## ")[0]
    try:
        rows = re.findall(r"^\| \w+ \| (.+?) \|", section, re.MULTILINE)
        assert {name for row in rows for name in row.split("; ")} >= cases(library).keys(), "python -m tests.zoo.table"
    except MissingError as error:
        pytest.skip(str(error))
