"""A real sampler process whose rows go over a local socket into a real ring, killed in between."""

import contextlib

import numpy as np
import pytest
from harness import poll
from test_contract_transitions import Remote, arrived, batch

from spreeze.envs.task import make_task
from spreeze.metrics.table import Phase
from spreeze.runtime.launcher import FRESH, RunContext, WorkerSpec
from spreeze.transport import status_table as words
from spreeze.transport.rate_limiter import RateLimiter
from spreeze.transport.replay_ring import ReplayReader
from spreeze.transport.status_table import STOP, StatusTable
from spreeze.types import RowLayout
from spreeze.workers.roles import Address
from spreeze.workers.sampler import SamplerJob


@pytest.fixture(scope="module")
def spec():
    task = make_task("Pendulum-v1")
    task.close()
    return task.spec


class Scene(Remote):
    """A ring behind a gateway, and a sampler that knows nothing but the gateway's address."""

    def __init__(self, folder, spec, least=0.0):
        super().__init__(folder, RowLayout.of(spec, checksum=True), f"unix:{folder}/gateway")
        self.folder, self.status, self.child = folder, StatusTable.create(1), None
        (folder / "logs").mkdir()
        self.job = SamplerJob(
            run_dir=str(folder), spec=spec, index=0, seed=3, num_envs=1, n_step=1, gamma=0.99, nan_policy="drop",
            ring=self.ring.spec, sink_address=self.where, sink_secret_file=str(folder / "secret"),
            limiter=RateLimiter(least, 512.0, 10, 64, self.ring.spec.num_shards),
        )  # fmt: skip

    def spawn(self):
        context = RunContext(run_dir=self.folder, status_fd=self.status.block.fd, status_rows=1, nonce="remote")
        self.child = FRESH.start(WorkerSpec(address=Address("sampler"), row=0, job=self.job.to_json()), context)

    def kill(self):
        self.child.kill_and_wait()
        self.child.close()
        self.child = None

    def close(self):
        if self.child is not None:
            self.kill()
        self.status.close()
        super().close()


@contextlib.contextmanager
def scene(*arguments, **options):
    made = Scene(*arguments, **options)
    try:
        yield made
    finally:
        made.close()


def check(place, rows):
    """Every row is one that Pendulum can give, and begins where the one before it ended, unless that was an end."""
    layout = place.ring.spec.layout
    obs, next_obs = rows[:, layout.obs], rows[:, layout.next_obs]
    for each in (obs, next_obs):
        assert np.hypot(each[:, 0], each[:, 1]) == pytest.approx(1.0, abs=1e-4)
    assert (np.abs(rows[:, layout.action]) <= 1.0).all()
    assert (rows[:, layout.reward] <= 0.0).all()
    return int((next_obs[:-1] != obs[1:]).any(axis=1).sum())


def test_a_remote_sampler_and_its_gateway_are_killed_and_no_row_is_torn(tmp_path, spec):
    with scene(tmp_path, spec) as place:
        first, reader = 0, ReplayReader(place.ring)
        for kills in range(3):
            place.spawn()
            poll(lambda first=first: place.ring.total_committed() > first + 150)
            if kills < 2:
                place.stop()
                place.start()
                before = place.ring.total_committed()
                poll(lambda before=before: place.ring.total_committed() > before + 100)
            place.kill()
            first = place.ring.total_committed()
            rows = arrived(place, 0, first)
            assert check(place, rows) <= 4, "an episode has 200 steps"
            for seed in range(5):
                check(place, batch(reader, seed=seed))


def test_a_remote_sampler_is_held_by_the_rate_limiter_and_stops_when_told(tmp_path, spec):
    with scene(tmp_path, spec, least=8.0) as place:
        def held_after():
            return place.status.control(0)[words.PHASE] == Phase.WAIT and place.ring.total_committed()

        place.spawn()
        poll(lambda: held_after() == 10 + 2 - 1, what="learning_starts, and one write of two samplers less one row")
        place.ring.begin_learning()
        place.ring.sampled += 160
        poll(lambda: held_after() == 11 + 160 // 8 + 2, what="a row for eight that were drawn, and one write")
        poll(lambda: place.status.named_slots(0, "sampler")["env_steps"] == 33)
        place.status.header[STOP] = 1
        assert poll(lambda: None if place.child.poll() is None else str(place.child.poll())) == "0"
