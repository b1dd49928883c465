"""Faults that need no run: provoked in this process, or pretended where they need a GPU or a broken machine."""

import errno
import gc
import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness import PATIENCE_S, REPO, SUPPORT
from rings import count_torn

from spreeze.config.schema import LearnerConfig, StopConfig
from spreeze.errors import CheckpointError, ConfigError, ResourceError, SpreezeError, WorkerError
from spreeze.metrics.store import MetricsReader
from spreeze.run_directory import read_run
from spreeze.runtime import recorder
from spreeze.transport import shared_memory
from spreeze.transport.checkpoint import CheckpointStore
from spreeze.transport.rate_limiter import RateLimiter
from spreeze.transport.replay_ring import ReplayReader, ReplayRing, RingHandle, RingSpec, ShardWriter
from spreeze.transport.status_table import RetunedSettings, StatusTable
from spreeze.transport.weights import WeightsStore, read_weights
from spreeze.types import Box, EnvSpec, RowLayout
from spreeze.workers import replay_trainer
from spreeze.workers.context import WorkerContext
from spreeze.workers.evaluator import read_rows
from spreeze.workers.jobs import ReplayLearnerJob
from spreeze.workers.replay_learner import learn_from_replay
from spreeze.workers.replay_trainer import ReplayTrainer
from spreeze.workers.roles import Address
from spreeze.workers.torch_devices import resolve_device

SPEC = EnvSpec(env_id="x", import_module=None, obs_dim=3, action=Box((-1.0,), (1.0,)),
               max_episode_steps=None, reward_threshold=None)  # fmt: skip


class Learner:
    """The learner's body in this process, over a ring that is already filled."""

    def __init__(self, tmp_path, reward=0.0, scale=1.0, **changes):
        self.ring = ReplayRing.create(RingSpec(RowLayout(3, 1), 1, 2000))
        rng = np.random.default_rng(0)
        obs = rng.standard_normal((1000, 3), dtype=np.float32) * np.float32(scale)
        self._rows = obs, obs[:, :1] * 0, np.full(1000, reward), np.zeros(1000), obs
        self._writer = ShardWriter(self.ring, 0)
        self._writer.write(*self._rows)
        self.status = StatusTable.create(2)
        self.read_fd, self._write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        self.context = WorkerContext(Address("learner"), self.status, 1, self._write_fd)
        learner = {"batch_size": 256, "threads": 1, "device": "cpu", "publish_interval_s": 0.05,
                   "checkpoint_interval_s": 1e6}  # fmt: skip
        learner |= {name: changes.pop(name) for name in learner.keys() & changes.keys()}
        fields = {
            "group_dir": str(tmp_path), "spec": SPEC, "algo": "sac", "algorithm": {"hidden_sizes": (8, 8)}, "seed": 1,
            "learner": LearnerConfig(**learner), "normalize_obs": False, "save_replay": False,
            "rollback_enabled": False,
            "stop": StopConfig(updates=60),
            "replay": RingHandle(fds=(os.dup(self.ring.fd),), spec=self.ring.spec),
            "limiter": RateLimiter(0.0, 1e9, 1, learner["batch_size"], 1), "sampler_status_rows": (0,),
            "session_started_s": time.monotonic(), "previous_wall_s": 0.0, "previous_env_steps": 0, "session": 1.0,
        }  # fmt: skip
        self.job = ReplayLearnerJob(**{**fields, **changes})

    def run(self):
        self.context.send = self._send
        self.messages = []
        for _ in learn_from_replay(self.context, self.job):
            pass

    def _send(self, kind, **fields):
        self.messages.append({"kind": kind, **fields})
        if fields.get("text", "").startswith("learning "):
            self._writer.write(*(column[:10] for column in self._rows))  # the band counts what comes after
        if kind == "finished":
            self.status.header[2] = 1

    def events(self):
        return [message["text"] for message in self.messages if message["kind"] == "event"]

    def close(self):
        self.context.close()
        os.close(self.read_fd)
        self._writer = None
        self.ring.close()


@pytest.fixture
def learner(tmp_path):
    made = []

    def make(**options):
        made.append(Learner(tmp_path, **options))
        return made[-1]

    yield make
    while made:
        made.pop().close()
    gc.collect()  # the learner's views keep its mapping alive


def _lines_of_a_write(ring, stop_at):
    """Runs a write of three rows and ends it before its ``stop_at``-th line; returns the lines that ran."""
    count = [0]
    codes = {ShardWriter.write.__code__, ShardWriter._write_checksums.__code__, ShardWriter._stamp.__code__}

    class Killed(BaseException):
        pass

    def trace(frame, event, arg):
        if frame.f_code not in codes:
            return None
        if event == "line":
            count[0] += 1
            if count[0] == stop_at:
                raise Killed
        return trace

    writer = ShardWriter(ring, 0)
    rows = np.full((3, 3), 7.0, dtype=np.float32)
    old = sys.gettrace()
    sys.settrace(trace)
    try:
        writer.write(rows, rows[:, :1], rows[:, 0], rows[:, 0] * 0, rows, version=9)
    except Killed:
        pass
    finally:
        sys.settrace(old)
    return count[0]


def test_f01_a_writer_killed_before_any_of_its_lines_leaves_no_torn_row():
    layout = RowLayout(3, 1, checksum=True)
    lines, k = 10**9, 0
    while k < lines:
        k += 1
        ring = ReplayRing.create(RingSpec(layout, 1, 16))
        try:
            obs = np.arange(36, dtype=np.float32).reshape(12, 3)
            ShardWriter(ring, 0).write(obs, obs[:, :1], obs[:, 0], obs[:, 0] * 0, obs)
            before = int(ring.committed[0])
            ran = _lines_of_a_write(ring, k)
            lines = ran + 1 if ran < k else 10**9
            reserved = int(ring.reserved[0])
            ShardWriter(ring, 0)
            assert int(ring.reserved[0]) == reserved, "a new writer never lowers what was announced"
            reader, out = ReplayReader(ring), np.empty((200, layout.width), dtype=np.float32)
            for _ in range(3):  # as the dead one left it, and while the next one writes over it
                reader.sample(np.random.default_rng(k), out)
                assert count_torn(reader, out) == 0, f"torn after a death before line {k}"
                ShardWriter(ring, 0).write(obs[:5], obs[:5, :1], obs[:5, 0], obs[:5, 0] * 0, obs[:5])
            assert int(ring.committed[0]) in (before + 15, before + 18)
        finally:
            ring.close()
    assert k > 20


@pytest.mark.parametrize("scaled", [True, False])
def test_f14_a_huge_reward_is_stored_and_bounded_where_it_is_learned(learner, scaled):
    algorithm = {"hidden_sizes": (8, 8), "normalize_returns": scaled}
    one = learner(reward=1e38, stop=StopConfig(updates=8), algorithm=algorithm)
    one.run()
    assert float(one.ring.rows[0, one.ring.spec.layout.reward]) == np.float32(1e38)
    assert one.context.slot_values()["updates_skipped"] == 0
    stored = CheckpointStore(Path(one.job.group_dir) / "checkpoints").load_latest()
    assert all(np.isfinite(array).all() for array in stored.tensors.values() if array.dtype.kind == "f")


@pytest.mark.parametrize("threads", [1, 2])
def test_a_learner_that_comes_back_while_the_run_is_tuned_goes_on_with_what_is_in_force(learner, threads):
    started = learner()
    started.status.retune(RetunedSettings(64, threads, 0.0, 1e9))
    started.run()
    posted = started.status.named_slots(1, "learner")
    assert (posted["batch_size"], posted["updates"]) == (64, 60)
    assert started.ring.rows_drawn == 64 * 60


def test_learning_that_has_started_before_goes_on(learner):
    first, second = learner(stop=StopConfig(updates=8)), learner(stop=StopConfig(updates=16))
    first.run()
    second.run()
    assert "learning started after 1000 transitions" in first.events()
    assert second.events()[:2] == ["learner continues from update 8", "learning resumed after 1000 transitions"]


def test_f16_many_skipped_updates_in_a_row_end_the_learner_which_then_goes_back_to_its_checkpoint(learner):
    with pytest.raises(WorkerError, match=r"consecutive updates had a non-finite loss or gradient"):
        learner(scale=np.nan, stop=StopConfig(updates=2000)).run()


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory (pretended)"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
                 "to allocate 33554432 bytes. Error code 12 (Cannot allocate memory)"),
    MemoryError("Unable to allocate 1.00 GiB for an array (pretended)"), RuntimeError("std::bad_alloc"),
], ids=["gpu", "processor", "numpy", "c++"])  # fmt: skip
def test_f19_stub_where_the_device_is_too_small_half_of_the_batch_is_taken_and_said(learner, monkeypatch, error):
    original, drawn = ReplayTrainer.update, []

    def update(self, most=None):
        drawn.append(self.batch_size)
        if self.batch_size > 64:
            raise error
        return original(self, most)

    monkeypatch.setattr(ReplayTrainer, "update", update)
    one = learner(stop=StopConfig(updates=5))
    one.run()
    assert drawn == [256, 128, 64, 64, 64, 64, 64]
    assert one.events()[1:] == [
        "batch 256 does not fit into the memory of cpu; continuing with 128; set --batch-size 128",
        "batch 128 does not fit into the memory of cpu; continuing with 64; set --batch-size 64",
    ]
    assert one.ring.rows_drawn == 5 * 64
    assert one.context.slot_values()["batch_size"] == 64


def test_f19_stub_a_mirror_of_replay_gives_its_memory_back_before_the_batch_gets_smaller(learner, monkeypatch):
    original, drawn, mirrors = ReplayTrainer.update, [], [True]

    def update(self, most=None):
        drawn.append(self.batch_size)
        if mirrors or self.batch_size > 128:
            raise torch.OutOfMemoryError("CUDA out of memory (pretended)")
        return original(self, most)

    monkeypatch.setattr(ReplayTrainer, "update", update)
    monkeypatch.setattr(ReplayTrainer, "drop_gpu_replay", lambda self: bool(mirrors) and mirrors.pop())
    one = learner(stop=StopConfig(updates=2))
    one.run()
    assert drawn == [256, 256, 128, 128]
    assert one.events()[1:] == [
        "out of memory on cpu: freed the GPU copy of replay; batches are gathered on the host",
        "batch 256 does not fit into the memory of cpu; continuing with 128; set --batch-size 128",
    ]


SHORT_OF_MEMORY = """
import json, pathlib, resource, sys
import psutil, torch
from test_fault_stubs import Learner
from spreeze.config.schema import StopConfig
from spreeze.workers.replay_trainer import ReplayTrainer

threads, room_bytes = int(sys.argv[2]), 100 * 2**20
torch.randn(512, 512) @ torch.randn(512, 512)  # what the maths library takes once
one = Learner(pathlib.Path(sys.argv[1]), batch_size=65536, threads=threads, stop=StopConfig(updates=2),
              algorithm={"hidden_sizes": (128, 128)})
original, drawn = ReplayTrainer.update, []

def update(self, most=None):
    if not drawn:
        limit = psutil.Process().memory_info().vms + room_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    drawn.append(self.batch_size)
    return original(self, most)

ReplayTrainer.update = update
one.run()
print(json.dumps([drawn, one.events()]))
one.close()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space hold on Linux")
@pytest.mark.parametrize("threads", [1, 2])
def test_f19_a_processor_without_memory_for_the_batch_goes_on_with_what_fits(tmp_path, threads):
    done = subprocess.run(
        [sys.executable, "-c", SHORT_OF_MEMORY, str(tmp_path), str(threads)], cwd=REPO, timeout=PATIENCE_S, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (REPO, SUPPORT, Path(__file__).parent)))},
        capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    drawn, events = json.loads(done.stdout)
    assert drawn[0] == 65536
    assert drawn[-2:] == [drawn[-1]] * 2, "two updates of one size"
    # Activations of 4,096 rows take 20 MB of the 100: what larger batches had taken is free again.
    assert 4096 <= drawn[-1] < 65536
    halved = drawn[:-1]
    assert events[1:] == [
        f"batch {size} does not fit into the memory of cpu; continuing with {size // 2}; set --batch-size {size // 2}"
        for size in halved[:-1]
    ]
    loaded = CheckpointStore(tmp_path / "checkpoints").load_latest()
    assert loaded.updates == 2


def test_f19_stub_memory_that_never_suffices_is_no_endless_loop(learner, monkeypatch):
    def update(self, most=None):
        raise torch.OutOfMemoryError("CUDA out of memory (pretended)")

    monkeypatch.setattr(ReplayTrainer, "update", update)
    with pytest.raises(torch.OutOfMemoryError):
        learner().run()


@pytest.mark.parametrize("words", ["an illegal memory access was encountered", "out of memory"])
def test_f20_stub_any_other_device_error_ends_the_process_and_is_never_caught(learner, monkeypatch, words):
    calls = []

    def update(self, most=None):
        calls.append(1)
        raise torch.AcceleratorError(f"CUDA error: {words} (pretended)")

    monkeypatch.setattr(ReplayTrainer, "update", update)
    with pytest.raises(RuntimeError, match=words):
        learner().run()
    assert len(calls) == 1


def test_f22_stub_a_device_that_is_gone_is_named_and_auto_takes_what_is_there(monkeypatch):
    monkeypatch.setattr(replay_trainer.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(replay_trainer.torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == "cuda:0"
    with pytest.raises(ConfigError, match=r"learner.device = cuda:1: this machine has 1 usable GPUs"):
        resolve_device("cuda:1")
    monkeypatch.setattr(replay_trainer.torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == "cpu"


def test_f26_stub_shared_memory_that_is_full_is_refused_with_both_sizes_before_the_first_touch(monkeypatch):
    def full(fd, offset, length):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shared_memory.os, "posix_fallocate", full)
    with pytest.raises(ResourceError, match=r"spreeze-replay needs \d+ bytes .* are available .*No space left"):
        ReplayRing.create(RingSpec(RowLayout(3, 1), 1, 1000))


class Trap:
    def __reduce__(self):
        return open, (os.environ["SPREEZE_TEST_MARKER"], "w")


def test_f35_a_pickle_in_place_of_any_file_is_refused_and_never_executed(tmp_path, monkeypatch):
    marker = tmp_path / "executed"
    monkeypatch.setenv("SPREEZE_TEST_MARKER", str(marker))
    evil = pickle.dumps(Trap())
    run = tmp_path / "run"
    checkpoints, weights = CheckpointStore(run / "checkpoints"), WeightsStore(run / "weights")
    saved = checkpoints.save({"a": np.zeros(3, np.float32)}, {"updates": 1}, epoch=1, updates=1)
    for path in saved.iterdir():
        good = path.read_bytes()
        path.write_bytes(evil)
        with pytest.raises(CheckpointError):
            checkpoints.load_latest()
        path.write_bytes(good)
    published = weights.publish({"a": np.zeros(3, np.float32)}, {}, 1, 1)
    Path(published).write_bytes(evil)
    assert weights.read_latest() is None
    with pytest.raises(SpreezeError):
        read_weights(Path(published))
    for name in ("run.json", "metrics.db", "eval.csv"):
        (run / name).write_bytes(evil)
    assert read_run(run) == {}
    assert read_rows(run / "eval.csv") == []
    with pytest.raises(SpreezeError):
        MetricsReader(run / "metrics.db").latest()
    assert not marker.exists()
    pickle.loads(evil).close()
    assert marker.exists(), "the trap would have worked"


@pytest.mark.parametrize("jump_s", [-86_400.0, 86_400.0])
def test_f43_a_clock_that_is_set_changes_no_duration_and_no_deadline(tmp_path, monkeypatch, jump_s):
    """All deadlines are monotonic; wall time is read once, for the age of the process."""
    now = time.time()
    monkeypatch.setattr(recorder, "MetricsWriter", lambda path: SimpleNamespace(
        event=lambda *a: None, write=lambda *a: None, evaluation=lambda *a: None, close=lambda: None,
        reports=list, rows_dropped=0))  # fmt: skip
    plan = SimpleNamespace(
        config=SimpleNamespace(
            evaluation=SimpleNamespace(episodes=1), stop=SimpleNamespace(target_return=0.0, target_evaluations=1),
            logging=SimpleNamespace(sinks=()), data_flow=SimpleNamespace(balanced=False),
            callback=SimpleNamespace(classes=()), env=SimpleNamespace(import_module=None),
        ),
        batch_size=1, learners=1, policies=1, ending=None, target_return=0.0, working_samplers=1,
        earlier=SimpleNamespace(sessions=0, best_return=None, wall_s=0.0),
    )  # fmt: skip
    made = recorder.Recorder(plan, SimpleNamespace(path=tmp_path), SimpleNamespace(note=lambda text: None))
    try:
        monkeypatch.setattr(recorder.time, "time", lambda: now + jump_s)
        made.evaluation(
            {"return_mean": 1.0, "episodes": 1, "target": {"reached": True, "episodes": 20, "return_mean": 1.0}}
        )
        age = recorder.process_age_s()
        assert made.outcome.time_to_target_s == pytest.approx(age, abs=3600.0)
        assert 0.0 <= made.session_s < 3600.0
    finally:
        made.close()
