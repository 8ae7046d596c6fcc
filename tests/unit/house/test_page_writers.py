"""Whoever asks what writes the page finds each file in `ds_hooks/shared/page/layout.py`."""

import re

from ds_hooks.shared.page import layout as page
from tests.support.paths import ROOT

WRITES = re.compile(r"words\[Field\.[A-Z_]+\] *[-+&|]?=[^=]|queue_writes")
CREATOR = {"ds_hooks/shared/page/file.py"}


def test_the_layout_names_every_file_that_writes_a_word() -> None:
    files = [path for package in ("ds_hooks", "squeezer", "trials") for path in (ROOT / package).rglob("*.py")]
    writers = {str(path.relative_to(ROOT)) for path in files if WRITES.search(path.read_text(encoding="utf-8"))}
    assert page.__doc__ is not None
    named = set(re.findall(r"[\w/]+\.py", page.__doc__))
    assert named == writers - CREATOR
