"""Random models that do all that is easily lost: trained together, trials equal the trials alone or are refused."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.support.random_models.models import Spec, specs
from tests.support.random_models.runs import Outcome, check

pytestmark = pytest.mark.filterwarnings("ignore")  # of PyTorch, about the layers' odd settings

WAYS = ("rule", "vmap", "loop", "refused")
MOST_REFUSED = 0.1


def tried(strategy: st.SearchStrategy[Spec], count: int, start: int = 0) -> list[tuple[Spec, Outcome]]:
    """Check models drawn from `strategy`, the same in every run from one `start`."""
    found: list[tuple[Spec, Outcome]] = []

    @seed(start)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def one(spec: Spec) -> None:
        found.append((spec, check(spec)))

    one()
    return found


def report(found: list[tuple[Spec, Outcome]]) -> str:
    """One line with the share of each way."""
    ways = Counter(outcome.way for _, outcome in found)
    return f"{len(found)} random models: " + ", ".join(f"{way} {ways[way] / len(found):.1%}" for way in WAYS)


def assert_few_refused(found: list[tuple[Spec, Outcome]]) -> None:
    refused = [(spec, outcome.reason) for spec, outcome in found if outcome.way == "refused"]
    assert len(refused) <= MOST_REFUSED * len(found), refused
    assert not [each for each in refused if each[0].plain], "layers alone are never refused"


def test_equal_or_refused() -> None:
    assert_few_refused(tried(specs(), 5) + tried(specs(plain=True), 2))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_two_thousand_are_equal_or_refused(part: int, capsys: pytest.CaptureFixture[str]) -> None:
    found = tried(st.one_of(*[specs()] * 7, specs(plain=True)), 500, part + 1)
    with capsys.disabled():
        print(f"\nseed {part + 1}, {report(found)}")
    assert len(found) == 500
    assert_few_refused(found)
