"""Collecting on a device: rows are what environments gave, whatever the autoreset mode, and nothing bad stays."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from device_envs import DeviceCounter, DevicePendulum
from learner_rates import HostWaits
from torch.utils._python_dispatch import TorchDispatchMode

from spreeze.algorithms import create, create_on_policy, losses
from spreeze.algorithms.on_device import DeviceActor, DeviceRollout, advantages, learn_rollout
from spreeze.config.algorithms import find_row
from spreeze.envs.vector_task import DeviceTask, as_tensor
from spreeze.errors import BadTransition, EnvError, ResourceError, WorkerError
from spreeze.inference.normalizer import DiscountedReturns, Normalizer
from spreeze.inference.policy import Policy
from spreeze.transport.transitions import NStepBatch
from spreeze.types import Box, EnvSpec, RolloutBatch, RowLayout
from spreeze.workers.device_learner import BLOCK, DeviceCollector
from spreeze.workers.gpu_replay import DeviceReplay, DeviceRows
from spreeze.workers.replay_batches import ReplayStatistics

CPU = torch.device("cpu")
SPEC = EnvSpec(
    env_id="vector:DeviceCounter-v0", import_module=None, obs_dim=2, action=Box((-1.0,), (1.0,)),
    max_episode_steps=5, reward_threshold=None,
)  # fmt: skip
MODES = ("NextStep", "SameStep", "Disabled")


def sac(device="cpu"):
    return create("sac", 2, 1, find_row("sac").config(hidden_sizes=(8,)), 0, device)


def collector(make, num_envs=2, n_step=1, capacity=4096, gamma=0.5, device="cpu", **options):
    replay = DeviceReplay(RowLayout(2, 1, n_step), capacity, 16, torch.device(device), 0)
    errors, returns = [], DiscountedReturns(gamma)
    rows, place = DeviceRows(replay, n_step, gamma, num_envs), torch.device(device)
    made = DeviceCollector(
        lambda seed: DeviceTask(make(), SPEC, place), num_envs, rows, DeviceActor(sac(device), 1), returns,
        seed=0, heartbeat=lambda phase: None,
        on_error=lambda where, error, count, **effect: errors.append((where, str(error))),
        **{"nan_policy": "drop"} | options,
    )  # fmt: skip
    return made, replay, errors


def steps(made, count):
    for _ in range(count):
        made.step(0)


def rows_of(replay):
    """Rows in the order in which they were written, without the column of actions."""
    replay.synchronize()
    rows = replay._rows[: replay.available].cpu().numpy()
    return [tuple(row) for row in np.delete(rows, 2, axis=1).tolist()]


def expected(env, length, last, steps):
    """obs, reward, terminated, next_obs of ``steps`` transitions in episodes of ``length`` that end by ``last``."""
    found = []
    for step in range(steps):
        episode, t = divmod(step, length)
        ends = last if t + 1 == length else 0.0
        found.append((float(episode), float(t), t + 1.0, ends, float(episode), t + 1.0))
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("options", "lengths", "last"), [({"limit": 5}, (5, 5), 0.0), ({"terminate_at": 3}, (3, 4), 1.0)]
)
def test_rows_are_worked_out_by_hand_and_a_truncated_episode_keeps_its_last_observation(mode, options, lengths, last):
    made, replay, errors = collector(lambda: DeviceCounter(2, autoreset=mode, **options))
    steps(made, 20)
    made.read_back()
    rows = rows_of(replay)
    counts = [
        sum((step % (length + 1)) < length for step in range(20)) if mode == "NextStep" else 20 for length in lengths
    ]
    both = [expected(env, length, last, count) for env, (length, count) in enumerate(zip(lengths, counts, strict=True))]
    assert sorted(rows) == sorted(both[0] + both[1])
    assert (errors, made.counts.env_steps) == ([], sum(counts))
    assert made.counts.episodes == sum(count // length for length, count in zip(lengths, counts, strict=True))
    assert made.counts.episode_length in lengths or lengths[0] != lengths[1]


@pytest.mark.parametrize("mode", MODES)
def test_rows_over_n_steps_are_those_of_other_samplers(mode):
    gamma, n = 0.5, 3
    made, replay, _ = collector(lambda: DeviceCounter(3, autoreset=mode, terminate_at=4, limit=6), 3, n, gamma=gamma)
    window, wanted, plain = NStepBatch(n, gamma, 3, 2, 1), [], []
    store = made._sink.store

    def both(obs, actions, step, good, ended, version):
        store(obs, actions, step, good, ended, version)
        columns = (obs, actions, step.reward, step.terminated.float(), step.next_obs)
        found = window.push(*(part.numpy() for part in columns), ended=ended.numpy(), lost=~good.numpy())
        if len(found[2]):
            wanted.extend(np.concatenate([part.reshape(len(part), -1) for part in found], 1).tolist())
        plain.append(good.sum().item())

    made._sink.store = both
    steps(made, 40)
    replay.synchronize()
    rows = replay._rows[: replay.available].numpy().tolist()
    assert sorted(map(tuple, rows)) == sorted(map(tuple, np.float32(wanted).tolist()))
    assert len(rows) >= sum(plain) - n * 3


@pytest.mark.parametrize(("what", "field"), [("reward", "reward"), ("obs", "observation")])
@pytest.mark.parametrize("mode", MODES)
def test_a_bad_value_is_named_never_stored_and_costs_that_environment_its_episode(mode, what, field):
    made, replay, errors = collector(lambda: DeviceCounter(4, autoreset=mode, bad=(2, 3, what)), 4)
    steps(made, 2 * BLOCK)
    rows = np.array(rows_of(replay))
    assert errors == [("environment 2", f"environment returned {field} = NaN or infinity")]
    assert np.isfinite(rows).all()
    assert made.counts.transitions_rejected == 1
    # Two good steps, then nothing until the log is read, then a new episode: the others go on as they were.
    assert len(rows) == made.counts.env_steps == 3 * 2 * BLOCK + 2 + BLOCK
    assert sorted({episode for episode, *_ in rows.tolist()}) == [0.0, 1.0]
    assert bool(torch.isfinite(made.obs).all())


def test_a_bad_value_ends_the_process_where_that_is_asked_and_so_do_too_many():
    made, _, _ = collector(lambda: DeviceCounter(2, bad=(1, 3, "obs")), nan_policy="fail")
    with pytest.raises(WorkerError, match="environment 1 returned an invalid transition"):
        steps(made, BLOCK)
    made, _, _ = collector(lambda: DeviceCounter(1), 1)
    made._env.step = lambda actions: (_ for _ in ()).throw(ValueError("broken"))
    made._make_env = lambda seed: made._env
    with pytest.raises(WorkerError, match="20 environment errors within 0 env steps"):
        steps(made, 30)


def test_observations_count_again_after_a_restart_which_empties_the_replay_of_a_device():
    made, replay, _ = collector(lambda: DeviceCounter(2))
    statistics = ReplayStatistics(RowLayout(2, 1), Normalizer(2), None, session=1.0, loaded_rows=())
    steps(made, BLOCK)
    replay.synchronize()
    statistics.update_obs(replay)
    counted = statistics.normalizer.count
    assert counted > 0
    state = statistics.state()
    state["counted"]["rows"] = [10**6]  # of the learner before
    statistics.load_state(state)
    steps(made, 2 * BLOCK)
    replay.synchronize()
    statistics.update_obs(replay)
    steps(made, 2 * BLOCK)
    replay.synchronize()
    statistics.update_obs(replay)
    assert statistics.normalizer.count > counted


def test_an_environment_that_raises_is_made_again_with_other_seeds_and_windows_begin_anew():
    seeds, envs = [], []

    def make():
        envs.append(DeviceCounter(2))
        return envs[-1]

    made, replay, errors = collector(make, n_step=3)
    made._make_env = lambda seed: seeds.append(seed) or DeviceTask(make(), SPEC, CPU)
    steps(made, 2)
    envs[0].step = lambda actions: (_ for _ in ()).throw(ValueError("broken"))
    envs[0].close = lambda **_: (_ for _ in ()).throw(ValueError("closing fails, too"))
    steps(made, 4)
    assert errors == [("the environments", "broken")]
    assert (seeds, len(envs)) == ([2], 2)
    replay.synchronize()
    assert replay.inserted == 2  # three steps of the new ones finish a window of three


def test_returns_and_their_unit_are_those_of_other_samplers():
    made, _, _ = collector(lambda: DeviceCounter(2, limit=5))
    steps(made, BLOCK)
    counted, rewards = DiscountedReturns(0.5), np.tile(np.arange(BLOCK) % 5 + 1.0, (2, 1)).T
    counted.add(rewards.astype(np.float32), rewards == 5.0)
    assert made.counts.returns == counted.sums()
    assert (made.counts.episodes, made.counts.episode_return, made.counts.episode_length) == (
        2 * (BLOCK // 5),
        15.0,
        5.0,
    )


def test_replay_keeps_the_newest_rows_and_draws_them_equally_often():
    replay = DeviceReplay(RowLayout(2, 1), 8, 4000, CPU, 0)
    for start in range(0, 24, 4):
        rows = torch.zeros(4, 7)
        rows[:, 0] = torch.arange(start, start + 4)
        replay.write(rows, torch.tensor([True, True, False, True]), start)
        replay.expect(4)
    assert replay.total_committed() == 24
    replay.synchronize()
    assert (replay.total_committed(), replay.available) == (18, 8)
    drawn, counts = np.unique(replay.draw()[:, 0].numpy(), return_counts=True)
    assert drawn.tolist() == [13, 15, 16, 17, 19, 20, 21, 23]
    assert 350 < counts.min() <= counts.max() < 650
    lag, age = replay.last_lag_age(30)
    assert 10 < lag < 16
    assert 3.0 < age < 4.0
    newest, end = replay.newer(0, 15, slice(0, 2))
    assert (newest[:, 0].tolist(), end) == ([20, 21, 23], 18)


def test_too_little_memory_is_said_with_what_to_lower():
    with pytest.raises(ResourceError, match=r"replay of 10{12} rows takes .*, which cpu does not have; lower"):
        DeviceReplay(RowLayout(100, 10), 10**12, 16, CPU, 0)


def test_the_actor_gives_what_the_policy_gives_that_samplers_read():
    obs = torch.randn(6, 2)
    for name, make in (("sac", create), ("td3", create), ("crossq", create)):
        algorithm = make(name, 2, 1, find_row(name).config(hidden_sizes=(8,)), 3, "cpu")
        actor, policy = (
            DeviceActor(algorithm, 0),
            Policy.from_weights(algorithm.policy_arrays(), algorithm.policy_meta()),
        )
        drawn = torch.stack([actor.act(obs) for _ in range(4000)])
        rng = np.random.default_rng(0)
        known = np.stack([policy.act(obs.numpy(), (), rng)[0] for _ in range(4000)])
        np.testing.assert_allclose(drawn.mean(0).numpy(), known.mean(0), atol=0.06)
        np.testing.assert_allclose(drawn.std(0).numpy(), known.std(0), atol=0.04)
        assert drawn.abs().max() <= 1.0
    ppo = create_on_policy("ppo", SPEC, find_row("ppo").config(hidden_sizes=(8,)), 0, "cpu", correction="on-policy")
    actor, policy = DeviceActor(ppo, 0), Policy.from_weights(ppo.policy_arrays(), ppo.policy_meta())
    action = actor.act(obs)
    mean, std = policy.outputs(obs.numpy()), ppo.net.log_std.exp().numpy()
    noise = (action.numpy() - mean) / std
    np.testing.assert_allclose(
        policy.sample(obs.numpy(), noise.astype(np.float32))[1], actor.log_prob.numpy(), atol=1e-5
    )


def test_advantages_are_those_of_the_host():
    generator = torch.Generator().manual_seed(0)
    reward, value, following = (torch.randn((12, 5), generator=generator) for _ in range(3))
    terminated, truncated = (torch.rand((12, 5), generator=generator) < 0.2 for _ in range(2))
    known = losses.advantages(
        reward.numpy(), value.numpy(), following.numpy(), terminated.numpy(), truncated.numpy(), 0.9, 0.8
    )
    found = advantages(reward, value, following, terminated, terminated | truncated, 0.9, 0.8)
    for here, there in zip(found, known, strict=True):
        np.testing.assert_allclose(here.numpy(), there, rtol=1e-5, atol=1e-6)


def test_a_rollout_learns_as_on_the_host():
    def algorithm():
        config = find_row("ppo").config(hidden_sizes=(8,), normalize_returns=False, minibatch_size=16)
        return create_on_policy("ppo", SPEC, config, 0, "cpu", correction="on-policy")

    one, other = algorithm(), algorithm()
    actor = DeviceActor(one, 1)
    rollout = DeviceRollout(8, 4, 2, 1, actor)
    task = DeviceTask(DeviceCounter(4, terminate_at=3, limit=4), SPEC, CPU)
    obs, nothing = task.reset(0), torch.zeros(8, 4, dtype=torch.bool)
    truncated = nothing.clone()
    with torch.no_grad():
        for t in range(8):
            action = actor.act(obs)
            step = task.step(action)
            truncated[t] = step.truncated
            rollout.store(obs, action, step, step.valid, step.terminated | step.truncated, 0)
            obs = step.obs
    assert rollout.full
    batch = one_batch(rollout, truncated)
    learn_rollout(one, rollout, None)
    other.learn(batch, None)
    np.testing.assert_allclose(one.parameters(), other.parameters(), rtol=1e-4, atol=1e-6)


def one_batch(rollout, truncated):
    parts = (
        rollout.obs,
        rollout.action,
        rollout.log_prob,
        rollout.reward,
        rollout.terminated,
        truncated,
        rollout.next_obs,
    )
    return RolloutBatch(*(part.numpy().copy() for part in parts))


def test_steps_without_a_transition_move_nothing_in_a_rollout():
    rollout = DeviceRollout(2, 2, 2, 1, SimpleNamespace(device=CPU, log_prob=torch.zeros(2)))
    task = DeviceTask(DeviceCounter(2), SPEC, CPU)
    step = task.step(torch.zeros(2, 1))
    bad = step._replace(reward=torch.tensor([1.0, torch.nan]), next_obs=torch.tensor([[0.0, 1.0], [torch.nan, 1.0]]))
    good = torch.tensor([True, False])
    rollout.store(torch.tensor([[0.0, 0.0], [torch.nan, 0.0]]), torch.zeros(2, 1), bad, good, ~good & good, 0)
    assert rollout.reward[0].tolist() == [1.0, 0.0]
    assert rollout.over[0].tolist() == [False, True]
    assert bool(torch.isfinite(rollout.obs).all())


def test_what_an_engine_has_to_say_is_asked_for():
    env = DeviceCounter(2)
    step = env.step
    env.step = lambda actions: (*step(actions)[:4], {})
    with pytest.raises(EnvError, match="no infos\\['final_obs'\\]"):
        DeviceTask(env, SPEC, CPU).step(torch.zeros(2, 1))
    with pytest.raises(EnvError, match="gives tensors on meta, and the learner is on cpu: use --device meta"):
        DeviceTask(DeviceCounter(2), SPEC, CPU)._rows(torch.zeros(2, 2, device="meta"))
    with pytest.raises(BadTransition, match="3 values for each environment; expected 2"):
        DeviceTask(DeviceCounter(2), SPEC, CPU)._rows(torch.zeros(2, 3))
    nested = DeviceTask(DeviceCounter(2), SPEC, CPU)._rows({"b": torch.ones(2, 1), "a": {"x": torch.zeros(2, 1)}})
    assert nested.tolist() == [[0.0, 1.0], [0.0, 1.0]]
    assert as_tensor(np.arange(3.0)).tolist() == [0.0, 1.0, 2.0]


def test_actions_reach_the_bounds_of_the_space():
    seen = []
    env = DevicePendulum(2)
    env.move = lambda actions: (seen.append(actions.flatten().tolist()), DevicePendulum.move(env, actions))[1]
    spec = EnvSpec(env_id="p", import_module=None, obs_dim=3, action=Box((-2.0,), (2.0,)), max_episode_steps=200,
                   reward_threshold=None)  # fmt: skip
    DeviceTask(env, spec, CPU).step(torch.tensor([[-1.0], [3.0]]))
    assert seen == [[-2.0, 2.0]]


class Waits(TorchDispatchMode):
    """Names of the operations for which the host would wait for a card."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        self.found += [name] if name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2") else []
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_between_two_reads_of_the_log_nothing_is_asked_of_the_device(mode, n_step):
    made, replay, _ = collector(lambda: DeviceCounter(2, autoreset=mode, limit=5, terminate_at=4), n_step=n_step)
    with Waits() as waits:
        steps(made, BLOCK - 1)
        replay.draw()
        assert waits.found == []
        steps(made, 1)
        assert waits.found != []


def test_a_rollout_asks_nothing_of_the_device_while_it_is_collected():
    config = find_row("ppo").config(hidden_sizes=(8,))
    ppo = create_on_policy("ppo", SPEC, config, 0, "cpu", correction="on-policy")
    actor = DeviceActor(ppo, 0)
    rollout = DeviceRollout(BLOCK, 2, 2, 1, actor)
    task = DeviceTask(DeviceCounter(2), SPEC, CPU)
    obs = task.reset(0)
    with torch.no_grad(), Waits() as waits:
        for _ in range(BLOCK):
            action = actor.act(obs)
            step = task.step(action)
            rollout.store(obs, action, step, step.valid, step.truncated, 0)
            obs = step.obs
    assert waits.found == []


@pytest.mark.gpu
@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_on_a_gpu_no_step_waits_and_the_rows_are_those_of_the_processor(mode, n_step):
    found = []
    for device in ("cpu", "cuda:0"):
        made, replay, _ = collector(
            lambda device=device: DeviceCounter(2, autoreset=mode, limit=5, terminate_at=4, device=device),
            n_step=n_step, device=device,
        )  # fmt: skip
        steps(made, 8)  # allocates what is made once
        with HostWaits(device) as waits:
            steps(made, 40)
        assert waits.count == 0
        found.append(sorted(rows_of(replay)))
    assert found[0] == found[1]
