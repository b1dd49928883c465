"""What a worker tells its supervisor."""

import contextlib
import json
import os
import re
from types import SimpleNamespace

import pytest

from spreeze.transport.status_table import STARTING_MS, StatusTable
from spreeze.workers.context import WorkerContext
from spreeze.workers.learner import UpdateLoop
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


def test_a_learner_does_not_count_the_start_of_slow_environments_as_training_time(tmp_path):
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    status = StatusTable.create(1)
    status.header[STARTING_MS] = 12_500
    with contextlib.closing(WorkerContext(Address("learner"), status, 0, write_fd, tmp_path)) as context:
        loop = SimpleNamespace(session_s=lambda: 30.0, _context=context)
        assert UpdateLoop.training_s(loop) == pytest.approx(17.5)
