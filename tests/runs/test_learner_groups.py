"""Two learners, each with samplers of its own, side by side under one supervisor."""

import os
import re
import signal
from types import SimpleNamespace

import pytest
from harness import FAULT, PENDULUM, TINY, Run, refused, train

from spreeze.config.layers import Layer, resolve
from spreeze.config.schema import MAX_LEARNERS
from spreeze.envs.probe import probe_env
from spreeze.machine.utilisation import CpuContention
from spreeze.metrics.table import SLOTS
from spreeze.run_directory import group_folder
from spreeze.runtime.cpu_governor import GovernorLoop
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.rates import CounterSample, GroupSample
from spreeze.transport import status_table
from spreeze.transport.checkpoint import CheckpointStore
from spreeze.transport.status_table import StatusTable
from spreeze.transport.weights import WeightsStore
from spreeze.workers.context import WorkerContext
from spreeze.workers.roles import ROLES, Address, role_of

_TWO = ("--learners", "2", "--samplers", "2", "--set", "learner.checkpoint_interval_s=0.5",
        "--set", "learner.publish_interval_s=0.1")  # fmt: skip


def _checkpoint(run, group):
    return CheckpointStore(group_folder(run.path, group) / "checkpoints").load_latest()


def _updates(run, group):
    return run.numbers().get(f"updates/{group}", 0)


def _learns_on(run, group):
    before = run.numbers()
    names = [f"updates/{group}", f"env_steps_per_s/{group}"]
    run.wait_for(lambda: run.numbers().get(names[0], 0) > before.get(names[0], 0) and run.numbers().get(names[1]),
                 what=f"further updates and env steps of group {group}")  # fmt: skip


def _kill_and_see_it_again(run, name, group):
    """Kills a worker: it comes back, both groups learn on, and the other's processes are the very same."""
    workers = run.wait_for(lambda: len(run.children()) == 5 and run.children(), what="all five workers")
    victim, restarts = workers.pop(name), run.numbers().get("restarts", 0)
    os.kill(victim.pid, signal.SIGKILL)
    run.wait_for(lambda: run.children().get(name) not in (None, victim) and run.numbers()["restarts"] > restarts,
                 what=f"another {name}")  # fmt: skip
    for each in (1 - group, group):
        _learns_on(run, each)
    assert run.numbers()["restarts"] == restarts + 1
    assert {other: process for other, process in run.children().items() if other != name} == workers
    assert any(f"{name} ended by SIGKILL" in event for event in run.events())


@pytest.mark.slow
def test_each_learner_and_a_sampler_are_killed_in_turn_and_both_groups_learn_on(tmp_path):
    with Run(tmp_path, *FAULT, *_TWO) as run:
        run.wait_for(lambda: all(_updates(run, group) >= 50 and _checkpoint(run, group) for group in (0, 1)),
                     what="updates and a checkpoint of both")  # fmt: skip
        assert set(run.children()) == {"learner", "sampler-0", "learner-g1", "sampler-g1-0", "evaluator"}
        for name, group in (("learner-g1", 1), ("sampler-g1-0", 1), ("learner", 0)):
            saved = _checkpoint(run, group).updates
            _kill_and_see_it_again(run, name, group)
            if "learner" in name:
                again = [event for event in run.events() if event.startswith(f"{name}: learner continues from update")]
                assert int(re.search(r"from update (\d+)", again[-1])[1]) >= saved > 0, (
                    "from its group's last checkpoint"
                )
        code, document = run.stop()
        assert (code, document["error"], document["restarts"]) == (0, None, 3)
        assert run.nonce_processes() == []
    ends = [_checkpoint(run, group) for group in (0, 1)]
    learners = document["learners"]
    assert [one["group"] for one in learners] == [0, 1]
    assert [one["updates"] for one in learners] == [end.updates for end in ends]
    assert document["updates"] == sum(end.updates for end in ends)
    assert len({one["parameters_sha256"] for one in learners}) == 2, "two seeds, two results"
    assert document["parameters_sha256"] == learners[0]["parameters_sha256"]
    assert document["eval_return_best"] >= max(one["eval_return"] for one in learners if "eval_return" in one)
    for name in ("learner", "learner-g1", "sampler-0", "sampler-g1-0"):
        assert (run.path / "logs" / f"{name}.log").exists()

    resumed, code, document = train(tmp_path, "--resume", "run", "--updates", str(ends[0].updates + ends[1].updates),
                                    tiny=("--no-visualizer", "--no-governor"))  # fmt: skip
    assert (code, document["stopped_by"]) == (0, "updates")
    for group, end in enumerate(ends):
        assert _checkpoint(resumed, group).updates >= ends[0].updates + ends[1].updates > end.updates
        assert WeightsStore(group_folder(resumed.path, group) / "weights").read_latest().epoch > 1
        said = f"learner{'-g1' if group else ''}: learner continues from update {end.updates}"
        assert said in resumed.events()


@pytest.mark.parametrize(("args", "message"), [
    (("--learners", "2", "--samplers", "1"), "run.learners = 2: each needs its own sampler"),
    (("--learners", "2", "--mode", "serial"), "run.learners = 2: sac in mode serial has one learner"),
    (("--learners", "2", "--mode", "hts", "--algo", "ppo"), "run.learners = 2: ppo in mode hts has one learner"),
    (("--learners", "2", "--auto", "--samplers", "2"), "--auto: it tunes a single learner"),
    (("--learners", "17",), "learners = 17: must be 1 to 16"),
])  # fmt: skip
def test_several_learners_where_they_cannot_be_are_rejected(tmp_path, capsys, args, message):
    document, _ = refused(capsys, tmp_path, *TINY[2:], *PENDULUM, *args)
    assert message in document["error"]


@pytest.mark.parametrize(("address", "name"), [
    (Address("learner"), "learner"), (Address("sampler", index=3), "sampler-3"),
    (Address("learner", 1), "learner-g1"), (Address("sampler", 1, 3), "sampler-g1-3"),
])  # fmt: skip
def test_a_name_has_the_group_unless_it_is_the_first_and_the_index_where_there_are_several(address, name):
    assert address.name == name
    assert role_of(name) is ROLES[address.role]
    assert role_of("supervisor") is None


@pytest.fixture
def status():
    made = StatusTable.create(MAX_LEARNERS)
    yield made
    made.close()


def test_a_published_policy_is_told_to_its_own_group_only(status):
    learners = [WorkerContext(Address("learner", group), status, group, None) for group in range(MAX_LEARNERS)]
    learners[1].weights_published()
    learners[15].weights_published()
    assert [learner.weights_counter for learner in learners] == [0, 1, *13 * [0], 1]
    assert status.header[status_table.STOP] == status.header[status_table.VISUALIZER_PAUSED] == 0


def test_the_governor_shares_out_active_samplers_among_the_groups_and_feeds_the_one_that_waits_most(status):
    values = {"run": {"learners": 2}, "env": {"id": "Pendulum-v1"}, "sampling": {"samplers": 3},
              "tuning": {"give_way": True}}  # fmt: skip
    plan = RunPlan(settings=resolve([Layer("test", values)]), spec=probe_env("Pendulum-v1", steps=0).spec, samplers=3,
                   free_core=False)  # fmt: skip
    assert [plan.samplers_of(group) for group in range(2)] == [2, 1]
    now, busy = (
        [0.0],
        CpuContention(
            usable_cores=2.0,
            external_cpu_cores=1.7,
            ran={},
            wanted={"learner": 0.3, "learner-g1": 0.3, "sampler-0": 0.3, "sampler-1": 0.3, "sampler-g1-0": 0.3},
        ),
    )
    governing = GovernorLoop(plan, status, lambda level, text: None, clock=lambda: now[0],
                             reader=SimpleNamespace(sample=lambda pids: busy))  # fmt: skip
    pids = {"learner": 7, "learner-g1": 8, "sampler-0": 9, "supervisor": 1}

    def look(waits_s):
        now[0] += 1.0
        blank = dict.fromkeys(SLOTS["learner"], 0.0)
        groups = [GroupSample((), {**blank, "updates": 9.0, "wait_s": wait_s}, 9000, 200, 9000) for wait_s in waits_s]
        return governing.update(CounterSample(now[0], tuple(groups)), pids)["samplers_active"]

    def shares():
        addresses = [Address("sampler"), Address("sampler", 0, 1), Address("sampler", 1)]
        return sum(WorkerContext(address, status, 0, None).sampler_share for address in addresses[:2]), WorkerContext(
            addresses[2], status, 0, None
        ).sampler_share

    assert shares() == (2.0, 1.0)
    active = [look((0.0, 0.0)) for _ in range(20)][-1]
    assert 0.0 < active < 3.0
    assert shares() == pytest.approx((2 * active / 3, max(active / 3, 0.125)), abs=0.001)
    starved = [look((0.0, 0.5 * second)) for second in range(20)][-1]
    assert starved > active, "one of the two waits for rows"
