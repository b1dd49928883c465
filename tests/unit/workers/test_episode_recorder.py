"""Recorded episodes: evaluations stay as they are, numbers and bounds by hand, pictures drawn again."""

import contextlib

import gymnasium
import numpy as np
import pytest
from kept_frames import frame_records
from linear_policy import BAD, GOOD, publish
from test_evaluator import job_of

from spreeze.config.schema import EvaluationConfig
from spreeze.envs.make import describe
from spreeze.envs.task import Task
from spreeze.metrics.recorded_episodes import FOLDER, NOTE, EvaluationKey, frames_path, kept_evaluations, read_recording
from spreeze.transport.weights import Weights, WeightsStore
from spreeze.workers.context import open_values
from spreeze.workers.episodes import episode_recorder, episode_redraw
from spreeze.workers.episodes.episode_recorder import EpisodeRecorder
from spreeze.workers.episodes.lockstep import run_episodes
from spreeze.workers.evaluator import Evaluation, WeightsWatch


def evaluated(run_dir, versions=(1,), **changes):
    """Records of evaluations of these versions."""
    store, found = WeightsStore(run_dir / "weights"), []
    with contextlib.closing(Evaluation(job_of(run_dir, **changes), lambda *error: None)) as evaluation:
        for version in versions:
            publish(store, GOOD if version % 2 else BAD, version)
            found.append(evaluation.evaluate(WeightsWatch(run_dir).newer(0)))
    return found


def config(**changes):
    return EvaluationConfig(episodes=4, seed=10, **changes)


def test_an_evaluation_is_the_same_to_the_bit_with_its_episodes_kept_or_not(tmp_path):
    kept = evaluated(tmp_path / "on", (1, 2, 3), config=config())
    plain = evaluated(tmp_path / "off", (1, 2, 3), config=config(keep_episodes=0))
    known = [record.pop("metrics") for record in kept]
    assert [record.pop("metrics") for record in plain] == [{"eval_terminated": 0.0}] * 3
    assert all(numbers.keys() == {"eval_terminated", "eval_actions_at_bound"} for numbers in known)
    assert kept == plain
    assert (tmp_path / "on" / "eval.csv").read_bytes() == (tmp_path / "off" / "eval.csv").read_bytes()
    assert len(kept_evaluations(tmp_path / "on")) == 3
    assert not (tmp_path / "off" / FOLDER).exists()


def test_best_median_and_worst_are_those_of_the_evaluation_and_repeat_from_seed_and_actions(tmp_path):
    (record,) = evaluated(tmp_path, config=config())
    (key,) = kept_evaluations(tmp_path)
    assert key == EvaluationKey(record["wall_s"], record["env_steps"], record["updates"], 0)
    recording = read_recording(tmp_path, key)
    best, median, worst = (recording.of_kind(kind) for kind in ("best", "median", "worst"))
    assert best.episode_return >= median.episode_return >= worst.episode_return
    assert recording.facts["return_mean"] == record["return_mean"]
    assert recording.facts["repeats"] is True
    for episode in (best, median, worst):
        assert episode.reward.sum() == pytest.approx(episode.episode_return, rel=1e-12)
        assert (episode.obs.shape, episode.action.shape) == ((episode.length + 1, 3), (episode.length, 1))


class Counter(gymnasium.Env):
    """Ends after ``seed`` steps; each tells two numbers, and the reward is drawn anew each time if ``odd``."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012

    def __init__(self, odd=False):
        self.observation_space = gymnasium.spaces.Box(-100.0, 100.0, (1,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self._odd = np.random.default_rng() if odd else None

    def reset(self, *, seed=None, options=None):
        self.left, self.at = seed, 0
        return np.array([self.left], np.float32), {}

    def step(self, action):
        self.left, self.at = self.left - 1, self.at + 1
        reward = float(self.left) if self._odd is None else float(self._odd.random())
        info = {"reward": {"way": reward, "energy": -1.0}, "name": "x", "speed": np.float32(2.0)}
        return np.array([self.left], np.float32), reward, self.left == 0, False, info

    def render(self):
        return np.full((30, 40, 3), 5 * self.at, np.uint8)


def opened(odd=False):
    return lambda *_, **__: Task(env := Counter(odd), describe(env))


def played(recorder, seeds=(3, 1, 2, 5)):
    """Plays these episodes with the recorder; their record."""
    recorder.begin(Weights({}, {}, 1, 1))
    still = lambda obs, state=(): (np.ones((len(obs), 1), np.float32), state)  # noqa: E731
    episodes = run_episodes(recorder.make_task, still, seeds, recorder.on_step)
    values = [episode.episode_return for episode in episodes]
    wall_s = 1.0 + len(kept_evaluations(recorder._run_dir))
    record = {"wall_s": wall_s, "env_steps": 10, "updates": 5, "group": 0, "version": 5,
              "return_mean": float(np.mean(values)), "return_std": 0.0, "episodes": len(seeds)}  # fmt: skip
    return recorder.keep(episodes, list(seeds), record)


@pytest.fixture
def spec():
    return describe(Counter())


def test_numbers_of_info_come_along_and_texts_do_not(tmp_path, monkeypatch, spec):
    monkeypatch.setattr(episode_recorder, "open_task", opened())
    played(EpisodeRecorder(tmp_path, spec, config()))
    recording = read_recording(tmp_path, EvaluationKey(1.0, 10, 5, 0))
    assert recording.facts["info"] == ["reward/energy", "reward/way", "speed"]
    best = recording.of_kind("best")
    assert (best.seed, best.reward.tolist()) == (5, [4.0, 3.0, 2.0, 1.0, 0.0])
    assert best.info.T.tolist() == [[-1.0] * 5, [4.0, 3.0, 2.0, 1.0, 0.0], [2.0] * 5]
    assert [recording.of_kind(kind).seed for kind in ("median", "worst")] == [2, 1]


@pytest.mark.parametrize(
    ("epoch", "version", "known"), [(2, 500, True), (2, 499, False), (2, 0, False), (1, 1000, False)]
)
def test_values_of_a_critic_that_has_learned_far_less_than_the_policy_are_not_told(
    tmp_path, spec, epoch, version, known
):
    open_values(tmp_path).publish({}, {}, epoch, version)
    recorder = EpisodeRecorder(tmp_path, spec, config())
    recorder.begin(Weights({}, {}, 2, 1000))
    assert (recorder._values is not None) is known


def test_values_and_actions_of_an_evaluation_are_told_as_means_over_all_of_its_episodes(tmp_path, monkeypatch, spec):
    monkeypatch.setattr(episode_recorder, "open_task", opened())
    recorder, seeds = EpisodeRecorder(tmp_path, spec, config()), [1, 3]

    def health(*terminated, **meta):
        recorder.begin(Weights({}, {}, 1, 1))
        acts = iter([1.0, 0.99, 0.97, -0.98])  # the first of both, then those of the longer one
        policy = lambda obs, state=(): (np.full((len(obs), 1), next(acts), np.float32), state)  # noqa: E731
        episodes = run_episodes(recorder.make_task, policy, seeds, recorder.on_step)
        episodes = [one._replace(terminated=end) for one, end in zip(episodes, terminated, strict=True)]
        recorder._values = (Weights({}, meta, 1, 1),) * 2
        return recorder.health(episodes, seeds)

    monkeypatch.setattr(episode_recorder, "step_values", lambda *given: 10.0 * given[2][:, 0])
    # Rewards 0, and 2, 1, 0 in states 1, and 3, 2, 1; both take action 1 first, the longer one then 0.99 and 0.97.
    means = {"eval_actions_at_bound": 3 / 4, "eval_start_value": 20.0, "eval_discounted_return": (0.0 + 2.5) / 2}
    assert health(True, True, gamma=0.5) == means
    assert health(True, False, gamma=0.5)["eval_discounted_return"] == (0.0 + 2.0 + 0.5 + 0.25 * 10.0) / 2
    assert health(True, True).keys() == {"eval_actions_at_bound"}
    assert recorder.health([], seeds) == {}


def test_what_is_kept_is_bounded_and_covers_the_whole_run(tmp_path, monkeypatch, spec):
    monkeypatch.setattr(episode_recorder, "open_task", opened())
    recorder = EpisodeRecorder(tmp_path, spec, config(keep_episodes=4))
    times = iter([0.0, 1.0, 2.0, 3.0, 8.0, 9.0, 20.0])
    for wall_s in times:
        monkeypatch.setattr(episode_recorder, "EvaluationKey", lambda *_, at=wall_s: EvaluationKey(at, 1, 1, 0))
        played(recorder)
    assert [key.wall_s for key in kept_evaluations(tmp_path)] == [0.0, 3.0, 9.0, 20.0]


def test_an_environment_that_does_not_repeat_is_drawn_while_it_is_played(tmp_path, monkeypatch, spec):
    monkeypatch.setattr(episode_recorder, "open_task", opened(odd=True))
    recorder = EpisodeRecorder(tmp_path, spec, config())
    assert played(recorder), "the first evaluation finds out, and the environments are made anew"
    assert recorder.repeats is False
    assert not played(recorder)
    first, second = kept_evaluations(tmp_path)
    assert not frames_path(tmp_path, first, "best").exists()
    longest = read_recording(tmp_path, second).of_kind("best").length
    steps = [step for step, _ in frame_records(frames_path(tmp_path, second, "best").read_bytes())]
    assert steps == list(range(longest + 1))


def recorded_run(tmp_path, monkeypatch, spec):
    """A run directory with one recording, whose pictures are drawn in this process."""
    monkeypatch.setattr(episode_recorder, "open_task", opened())
    played(EpisodeRecorder(tmp_path, spec, config()))
    monkeypatch.setattr(episode_redraw, "spec_from", lambda data: spec)
    return kept_evaluations(tmp_path)[0]


def test_pictures_are_drawn_again_from_the_seed_and_the_actions(tmp_path, monkeypatch, spec):
    key = recorded_run(tmp_path, monkeypatch, spec)
    monkeypatch.setattr(episode_redraw, "open_task", opened())
    assert episode_redraw.draw(tmp_path, key, "best") == ""
    records = list(frame_records(frames_path(tmp_path, key, "best").read_bytes()))
    assert [step for step, _ in records] == [0, 1, 2, 3, 4, 5]
    assert all(data.startswith(b"\xff\xd8") for _, data in records)
    assert not list((tmp_path / FOLDER).glob("*.drawing"))


def test_pictures_end_where_the_environment_does_something_else(tmp_path, monkeypatch, spec):
    key = recorded_run(tmp_path, monkeypatch, spec)
    monkeypatch.setattr(episode_redraw, "open_task", opened(odd=True))
    assert "end at step 1" in episode_redraw.draw(tmp_path, key, "best")
    (step, _), (note, text) = frame_records(frames_path(tmp_path, key, "best").read_bytes())
    assert (step, note) == (0, NOTE)
    assert b"did not do" in text


def test_a_recording_that_cannot_be_written_costs_the_evaluation_nothing(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(EpisodeRecorder, "keep", lambda *_, **__: (_ for _ in ()).throw(OSError("disk full")))
    publish(WeightsStore(tmp_path / "weights"), GOOD, 1)
    with contextlib.closing(Evaluation(job_of(tmp_path), lambda *error: None, on_failure=told.append)) as evaluation:
        assert evaluation.evaluate(WeightsWatch(tmp_path).newer(0)) is not None
    assert [text.partition(" (")[0] for text in told] == ["episodes were not kept: OSError: disk full"]
