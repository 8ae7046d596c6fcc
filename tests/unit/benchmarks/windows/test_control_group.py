"""The control group of the least weight."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.windows.control_group import LEAST, NoLeastWeightError, _made, least_weight_group

ENTERS = "import sys; open(sys.argv[1], 'w').write('0'); print(open('/proc/self/cgroup').read())"


def test_a_process_enters_it_and_it_goes_when_that_has_ended() -> None:
    try:
        with least_weight_group() as processes:
            group = processes.parent
            weights = {name: (group / name).read_text().strip() for name in LEAST if (group / name).exists()}
            command = [sys.executable, "-c", ENTERS, str(processes)]
            entered = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except NoLeastWeightError as error:
        pytest.skip(f"no control group of the least weight here: {error}")
    assert len(weights) == 1 and all(LEAST[name] == value for name, value in weights.items())
    assert any(line.endswith(f"/{group.name}") for line in entered.splitlines())
    assert not group.exists()


def test_where_there_can_be_none_it_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(NoLeastWeightError, match=r"its groups have no weight; .*gone: No such file"):
        _made([tmp_path, tmp_path / "gone"])
    assert not os.listdir(tmp_path)
