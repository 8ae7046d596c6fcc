"""What a search worker is told when it begins."""

from dataclasses import dataclass
from pathlib import Path

from trials.search.storage.claims import LEASE_S


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """Where a search worker keeps its trials, and its name.

    Args:
        storage: a database's URL or a journal's path, see `open_storage`.
        study_name: Optuna's study name; the study is created if it does not exist.
        worker: this worker's name. It takes over at once what an earlier process of this name left.
        directory: the study's, for checkpoints and claims; None: there are no checkpoints.
        lease_s: how long others wait for a sign of life before they take over.
        exclusive_rows: how many trials it trains at once on a device of its own; 0: it is in bubbles.
    """

    storage: str
    study_name: str
    worker: str
    directory: Path | None = None
    lease_s: float = LEASE_S
    exclusive_rows: int = 0
