import contextlib
import dataclasses
import json
import os
import re
import threading

import av
import pytest
from fault_envs import FaultEnv
from harness import NOBODY, PATIENCE_S
from linear_policy import GOOD, IDLE, SPEC, publish, wait_until
from PIL import Image

from spreeze.config.schema import VisualizerConfig
from spreeze.transport.status_table import STOP, VISUALIZER_PAUSED, WEIGHTS_COUNTER, StatusTable
from spreeze.transport.weights import WeightsStore
from spreeze.workers import visualizer
from spreeze.workers.context import WorkerContext, pause_s
from spreeze.workers.roles import Address
from spreeze.workers.visualizer import VisualizerJob, run_visualizer


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(visualizer, "_FIRST_CLIP_S", 0.1)
    monkeypatch.setattr(visualizer, "_NEW_WEIGHTS_S", 0.1)
    monkeypatch.setattr(visualizer, "_WATCHED_S", 1000.0)


def job_of(tmp_path, **changes):
    (tmp_path / "control").mkdir(exist_ok=True)
    (tmp_path / "control" / "viewer").touch()
    fields = {
        "frames_per_s": 60.0, "clip_interval_s": 1.0, "clip_length_s": 1.0, "cpu_share": 1.0, "has_free_core": True,
        "spec": SPEC, **changes,
    }  # fmt: skip
    others = {name: fields.pop(name) for name in ("has_free_core", "spec")}
    return VisualizerJob(run_dir=str(tmp_path), seed=0, config=VisualizerConfig(**fields), **others)


@contextlib.contextmanager
def running(job):
    status = StatusTable.create(7)
    read_fd, write_fd = os.pipe()
    os.set_blocking(read_fd, False)
    context = WorkerContext(Address("visualizer"), status, 0, write_fd)
    errors = []

    def body():
        try:
            run_visualizer(context, job)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    try:
        yield status, thread
    finally:
        status.header[STOP] = 1
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        running.messages = []
        with contextlib.suppress(BlockingIOError):
            running.messages = [json.loads(line) for line in os.read(read_fd, 1 << 16).splitlines()]
        running.errors = errors
        os.close(read_fd)
        context.close()


def slots(status):
    return status.named_slots(0, "visualizer")


def test_the_picture_and_a_clip_with_its_version_appear(tmp_path):
    publish(WeightsStore(tmp_path / "weights"), GOOD, 7)
    with running(job_of(tmp_path)) as (status, _):
        wait_until(lambda: slots(status)["clips"] >= 1)
        found = slots(status)
    assert found["policy_version"] == 7
    assert found["frames"] >= 15
    with Image.open(tmp_path / "live.jpg") as image:
        assert image.size == (65, 48)
    clip = tmp_path / "videos" / "clip-0001-v7.mp4"
    facts = json.loads(clip.with_suffix(".json").read_text())
    assert (facts["version"], facts["epoch"], facts["wall_s"], facts["frames"]) == (7, 1, 3.5, 15)
    assert facts["frames_per_s"] == 15.0
    assert facts["return_so_far"] <= 0.0
    with av.open(str(clip)) as container:
        assert len(list(container.decode(video=0))) == 15
    assert not list((tmp_path / "videos").glob(".tmp-*"))


def test_a_stop_keeps_what_there_is_of_a_clip_that_plays_for_a_second_or_more(tmp_path):
    publish(WeightsStore(tmp_path / "weights"), GOOD, 7)
    with running(job_of(tmp_path, clip_length_s=600.0)) as (status, _):
        wait_until(lambda: list((tmp_path / "videos").glob(".tmp-*")))
        begun = slots(status)["frames"]
        wait_until(lambda: slots(status)["frames"] > begun + 15)
    (clip,) = (tmp_path / "videos").glob("clip-*.mp4")
    facts = json.loads(clip.with_suffix(".json").read_text())
    assert 15 <= facts["frames"] < 9000
    with av.open(str(clip)) as container:
        assert len(list(container.decode(video=0))) == facts["frames"]


def test_what_a_killed_one_left_is_removed_and_another_programs_clip_is_not(tmp_path):
    videos = tmp_path / "videos"
    videos.mkdir()
    left, kept = [folder / f".tmp-{NOBODY}-ab" for folder in (tmp_path, videos)], videos / f".tmp-{os.getpid()}-cd"
    for path in (*left, kept):
        path.write_bytes(b"half")
    publish(WeightsStore(tmp_path / "weights"), GOOD, 7)
    with running(job_of(tmp_path)) as (status, _):
        wait_until(lambda: slots(status)["frames"] >= 1)
    assert [path for path in left if path.exists()] == []
    assert kept.exists()


def test_newer_weights_are_taken_but_never_inside_of_a_clip(tmp_path):
    store = WeightsStore(tmp_path / "weights")
    publish(store, IDLE, 1)
    with running(job_of(tmp_path)) as (status, _):
        wait_until(lambda: slots(status)["frames"] >= 1)
        publish(store, GOOD, 2)
        status.header[WEIGHTS_COUNTER] += 1
        wait_until(lambda: slots(status)["policy_version"] == 2)
        wait_until(lambda: slots(status)["clips"] >= 1 and list((tmp_path / "videos").glob("*-v2.mp4")))
    for clip in (tmp_path / "videos").glob("*.mp4"):
        assert clip.stem.endswith(f"-v{json.loads(clip.with_suffix('.json').read_text())['version']}")


def test_it_rests_while_paused_and_goes_on_after(tmp_path):
    publish(WeightsStore(tmp_path / "weights"), GOOD, 1)
    with running(job_of(tmp_path)) as (status, _):
        wait_until(lambda: slots(status)["frames"] >= 2)
        status.header[VISUALIZER_PAUSED] = 1
        wait_until(lambda: slots(status)["paused"] == 1.0)
        frames, beats = slots(status)["frames"], int(status.control(0)[0])
        wait_until(lambda: int(status.control(0)[0]) > beats + 3)
        assert slots(status)["frames"] == frames
        status.header[VISUALIZER_PAUSED] = 0
        wait_until(lambda: slots(status)["frames"] > frames)
        assert slots(status)["paused"] == 0.0


def test_nothing_is_drawn_while_nobody_looks_but_clips_come_in_time(tmp_path):
    publish(WeightsStore(tmp_path / "weights"), GOOD, 1)
    job = job_of(tmp_path, clip_interval_s=1.5)
    (tmp_path / "control" / "viewer").unlink()
    with running(job) as (status, _):
        wait_until(lambda: slots(status)["clips"] >= 1)
        beats = int(status.control(0)[0])
        wait_until(lambda: int(status.control(0)[0]) > beats + 1)  # the picture that ends the clip is drawn
        frames = slots(status)["frames"]
        wait_until(lambda: int(status.control(0)[0]) > beats + 4)
        assert slots(status)["frames"] == frames, "nobody looked"
        assert (tmp_path / "live.jpg").exists()
        wait_until(lambda: slots(status)["clips"] >= 2)
        (tmp_path / "control" / "viewer").touch()
        frames = slots(status)["frames"]
        wait_until(lambda: slots(status)["frames"] > frames + 3)


def test_an_environment_that_cannot_be_drawn_is_told_once_and_ends_quietly(tmp_path, monkeypatch):
    monkeypatch.setattr(FaultEnv, "render", lambda self: None)
    publish(WeightsStore(tmp_path / "weights"), GOOD, 1)
    with running(job_of(tmp_path)) as (_, thread):
        wait_until(lambda: not thread.is_alive())
    (message,) = running.messages
    assert (message["kind"], message["level"]) == ("event", "warning")
    assert "visualizer disabled" in message["text"]
    assert not running.errors
    assert not (tmp_path / "live.jpg").exists()


def test_an_environment_that_cannot_be_made_ends_it_quietly_too(tmp_path):
    with running(job_of(tmp_path, spec=dataclasses.replace(SPEC, env_id="NoSuch-v0"))) as (_, thread):
        wait_until(lambda: not thread.is_alive())
    assert "unknown environment" in running.messages[0]["text"]
    assert not running.errors


def test_a_fault_in_the_middle_drops_the_clip_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("SPREEZE_FAULT_P_CRASH", "0.03")
    monkeypatch.setenv("SPREEZE_FAULT_SEED", "3")
    publish(WeightsStore(tmp_path / "weights"), GOOD, 1)
    real = FaultEnv.step
    crashes = []

    def step(self, action):
        try:
            return real(self, action)
        except RuntimeError:
            crashes.append(1)
            raise

    monkeypatch.setattr(FaultEnv, "step", step)
    with running(job_of(tmp_path)) as (status, _):
        wait_until(lambda: crashes)
        frames = slots(status)["frames"]
        wait_until(lambda: slots(status)["frames"] > frames + 2)
    assert any("rendering failed" in message["text"] for message in running.messages)
    assert not running.errors


def test_many_failures_in_a_row_end_nothing_and_the_next_attempts_are_told_rarely(tmp_path, monkeypatch):
    publish(WeightsStore(tmp_path / "weights"), GOOD, 1)
    real, drawn, pauses = FaultEnv.render, [], []

    def render(self):
        drawn.append(self)
        if 1 < len(drawn) <= 13:
            raise RuntimeError("no display")
        return real(self)

    monkeypatch.setattr(FaultEnv, "render", render)
    monkeypatch.setattr(visualizer, "pause_s", lambda failures: pauses.append(pause_s(failures)) or 0.0)
    with running(job_of(tmp_path)) as (status, _):
        wait_until(lambda: slots(status)["frames"] > 2)
    assert len({id(env) for env in drawn[1:14]}) == 13, "each attempt has an environment of its own"
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, *[60.0] * 6]
    assert [
        re.sub(r" \(test_visualizer.py:\d+\)$", "", message["text"])
        for message in running.messages
        if "failed" in message["text"]
    ] == ["rendering failed: RuntimeError: no display", "rendering failed 10 times in a row: RuntimeError: no display"]
    assert not running.errors


def test_what_has_failed_for_weeks_is_still_tried_once_a_minute():
    assert [pause_s(failures) for failures in (1, 2, 7, 2000)] == [1.0, 2.0, 60.0, 60.0]


def test_without_a_free_core_a_frame_s_cost_is_slept_off(tmp_path, monkeypatch):
    publish(WeightsStore(tmp_path / "weights"), GOOD, 1)
    clock = iter(float(i) for i in range(100_000))
    monkeypatch.setattr(visualizer.time, "process_time", lambda: next(clock))
    rests = []
    status = StatusTable.create(7)
    context = WorkerContext(Address("visualizer"), status, 0, None)

    def sleep(seconds, *rest):
        rests.append(seconds)
        if len(rests) == 5:
            status.header[STOP] = 1

    monkeypatch.setattr(context, "sleep", sleep)
    run_visualizer(context, job_of(tmp_path, has_free_core=False, cpu_share=0.1))
    assert all(0.0 < rest <= 10.0 for rest in rests)
    context.close()


def test_clip_numbers_go_on_after_a_restart_and_old_clips_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(visualizer, "_MAX_CLIPS", 2)
    for number in (8, 9, 10):
        (tmp_path / f"clip-{number:04d}-v1.mp4").touch()
        (tmp_path / f"clip-{number:04d}-v1.json").touch()
    assert max(map(visualizer._number_of, tmp_path.glob("*.mp4"))) == 10
    visualizer._prune(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.mp4")) == ["clip-0009-v1.mp4", "clip-0010-v1.mp4"]
    assert len(list(tmp_path.iterdir())) == 4


def test_a_job_travels_as_json(tmp_path):
    job = job_of(tmp_path)
    assert VisualizerJob.from_json(json.loads(json.dumps(job.to_json()))) == job
