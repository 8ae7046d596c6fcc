"""What a server makes of the claims' statements when no program of ours sends them: PostgreSQL's own pgbench does."""

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import psycopg
import sqlalchemy as sa

from benchmarks.search_cost.simulated import NAME
from benchmarks.search_cost.statements import claim_one
from trials.search.storage.claims import Claims
from trials.search.storage.database import connect

_TRIAL = 987_654_321
"""It occurs nowhere else. In its place each transaction of pgbench has a number of its own, and so in those of ids."""

_UNIQUE = "replace(gen_random_uuid()::text, '-', '')"


def script(storage: str, directory: Path) -> str:
    """Claim a trial and report its scores once. Returns what that has sent, for pgbench."""
    claims = Claims(connect(storage, directory), NAME, "w")
    lines = [rf"\set trial random(1, {_TRIAL - 1})"]

    def note(connection: sa.Connection, _cursor: object, statement: str, values: Any, *_: object) -> None:
        raw = connection.connection.dbapi_connection
        assert isinstance(raw, psycopg.Connection)
        plain = psycopg.ClientCursor(raw).mogrify(statement, values)
        plain = re.sub(r"'[0-9a-f]{32}'", _UNIQUE, re.sub(r"\s+", " ", plain))
        lines.append(f"{plain.replace(str(_TRIAL), ':trial')};")

    sa.event.listen(claims._engine, "begin", lambda _: lines.append("BEGIN;"))
    sa.event.listen(claims._engine, "before_cursor_execute", note)
    sa.event.listen(claims._engine, "commit", lambda _: lines.append("COMMIT;"))
    claim_one(claims, _TRIAL)
    claims.close()
    return "\n".join(lines)


def ceiling(pgbench: Path, storage: str, directory: Path, workers: int, seconds: float) -> dict[str, Any]:
    """Let pgbench send the same statements, as fast as it can.

    Args:
        pgbench: the program.
        storage: an empty database.
        directory: the study's.
        workers: how many connections.
        seconds: for how long.

    Returns:
        Per second: statements and trials.
    """
    sent = script(storage, directory)
    with tempfile.TemporaryDirectory(prefix="bsq-") as folder:
        file = Path(folder) / "claims.sql"
        file.write_text(sent)
        url = sa.make_url(storage)
        options = {"-f": file, "-c": workers, "-j": min(workers, os.cpu_count() or 1), "-T": max(1, round(seconds))}
        options |= {"-h": url.host, "-p": url.port, "-U": url.username}
        words = [str(word) for option in options.items() for word in option]
        said = subprocess.run(
            [str(pgbench), "-n", *words, str(url.database)],
            env=os.environ | {"PGPASSWORD": str(url.password)},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    found = re.search(r"^tps = ([\d.]+)", said.stdout, re.MULTILINE)
    assert found is not None, said.stdout
    trials = float(found[1])
    statements = sum(not line.startswith(("\\", "BEGIN", "COMMIT")) for line in sent.split("\n"))
    return {"workers": workers, "statements_per_s": round(trials * statements, 1), "trials_per_s": round(trials, 1)}
