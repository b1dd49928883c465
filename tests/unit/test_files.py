import os

import pytest
from harness import NOBODY

from spreeze.files import TEMP_PREFIX, read_bytes, read_json, remove_unfinished, temp_name


def test_temporary_files_of_writers_that_have_ended_are_removed_and_no_others(tmp_path):
    kept = {temp_name(), f"{TEMP_PREFIX}1-of-init", "eval.csv", f"{TEMP_PREFIX}{NOBODY}-folder"}
    (tmp_path / f"{TEMP_PREFIX}{NOBODY}-folder").mkdir()
    for name in (*kept, f"{TEMP_PREFIX}{NOBODY}-ab", f"{TEMP_PREFIX}{10**30}-ab", f"{TEMP_PREFIX}unknown"):
        if not (tmp_path / name).exists():
            (tmp_path / name).write_bytes(b"half")
    remove_unfinished(tmp_path)
    assert set(os.listdir(tmp_path)) == kept
    remove_unfinished(tmp_path / "missing")


def test_a_pipe_in_a_run_from_elsewhere_blocks_no_reader(tmp_path):
    os.mkfifo(tmp_path / "run.json")
    assert read_json(tmp_path / "run.json") == {}
    with pytest.raises(OSError, match="not a regular file"):
        read_bytes(tmp_path / "run.json", 100)
    with pytest.raises(IsADirectoryError):
        read_bytes(tmp_path, 100)
