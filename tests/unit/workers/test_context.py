"""What a worker tells its supervisor."""

import contextlib
import json
import os
import re

from spreeze.transport.status_table import StatusTable
from spreeze.workers.context import WorkerContext
from spreeze.workers.roles import Address


def test_an_environments_error_is_kept_with_its_traceback_and_told(tmp_path):
    read_fd, write_fd = os.pipe()
    with contextlib.closing(WorkerContext(Address("sampler"), StatusTable.create(1), 0, write_fd, tmp_path)) as context:
        try:
            raise ValueError("reward is a fish")
        except ValueError as error:
            context.env_error("environment 3, episode 2, step 5", error, 10)
    with open(read_fd, "rb") as pipe:
        (message,) = [json.loads(line) for line in pipe]
    assert (message["kind"], message["level"], message["from"]) == ("event", "warning", "sampler-0")
    assert re.fullmatch(
        r"environment 3, episode 2, step 5: ValueError: reward is a fish "
        r"\(test_context.py:\d+\); its episode is lost; 10 such errors so far",
        message["text"],
    )
    (path,) = tmp_path.iterdir()
    record = json.loads(path.read_text())
    assert record["process"] == "sampler-0"
    assert record["error"].startswith("ValueError: reward is a fish")
    assert 'raise ValueError("reward is a fish")' in record["traceback"]
