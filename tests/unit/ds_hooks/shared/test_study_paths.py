"""Each study has a directory of its own, whatever it is called."""

from pathlib import Path

from ds_hooks.shared.study_paths import trials_directory


def test_no_name_leads_out_of_the_directory_of_studies(tmp_path: Path) -> None:
    names = ["", ".", "..", "...", "/", "../x", "%", "%.", "small"]
    found = [trials_directory(tmp_path, name).resolve() for name in names]
    assert len(set(found)) == len(names) and {path.parent for path in found} == {tmp_path.resolve()}


def test_a_name_may_be_longer_than_that_of_a_file(tmp_path: Path) -> None:
    names = ["x" * 255, "x" * 256, "x" * 257, "ü" * 200, "ü" * 199 + "ö", "日本" * 200, "a b/" * 64, "." * 300]
    found = [trials_directory(tmp_path, name) for name in names]
    for path in found:
        path.mkdir()
    assert len(set(found)) == len(names) and found[0].name == names[0], "as it was called ever"
