"""Learners on other hosts: each living host gets a run that joins, and messages go to and fro; without Ray."""

import contextlib
import os
import subprocess
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from harness import HIDDEN_SIZES, PATIENCE_S, Run, descendants, poll
from hosts_without_ray import HostsWithoutRay, Told, inherited

from spreeze import __version__
from spreeze.config.layers import Layer, resolve
from spreeze.runtime.cluster import host, learner_bridge
from spreeze.runtime.cluster.host import GatewayActor, HostRun, HostRunJob
from spreeze.runtime.cluster.learner_bridge import LearnerBridge
from spreeze.runtime.plan import RunPlan
from spreeze.transport import gossip
from spreeze.transport.chunks import sign_json, verify_json
from spreeze.transport.gossip import GossipMemory, GossipMessage, sign_messages
from spreeze.types import Choices, EnvSpec
from spreeze.workers.jobs import LearnerBridgeJob

SPEC = EnvSpec(env_id="CartPole-v1", import_module=None, obs_dim=4, action=Choices((2,)),
               max_episode_steps=500, reward_threshold=None)  # fmt: skip
_SMALL = ("--env", "CartPole-v1", "--algo", "a2c", "--mode", "gala", "--envs-per-sampler", "2", "--sync-interval", "8",
          "--samplers", "1", "--set", f"a2c.hidden_sizes={HIDDEN_SIZES}", "--set", "evaluation.episodes=2",
          "--no-visualizer", "--no-governor")  # fmt: skip
SECRET = b"s" * 32


@pytest.fixture
def memory():
    """Memory of this host, whose learner is number 0 of two."""
    made = GossipMemory.create(2, (0,))
    yield made
    made.close()


@pytest.fixture
def without_runs(monkeypatch):
    """Learners of other hosts are in this process."""
    monkeypatch.setattr(host.HostRun, "start", lambda run: None)
    monkeypatch.setattr(host.HostRun, "end", lambda run, within_s: run.memory.close())
    monkeypatch.setattr("spreeze.runtime.cluster.bridge._NODES_S", 0.0)
    monkeypatch.setattr(learner_bridge, "_PING_S", 0.0)


@contextlib.contextmanager
def bridge(nodes, memory, arguments=_SMALL):
    context = Told()
    job = LearnerBridgeJob(address="here", messages=inherited(memory.handle()), topology="ring", arguments=arguments)
    made = LearnerBridge(context, job, nodes)
    try:
        yield made, context.events
    finally:
        made.close()


def a_job(**changed):
    return HostRunJob(**{"arguments": (), "number": 1, "learners": 2, "version": __version__} | changed)


def runs(process):
    """True for a process that has not ended, whether it was waited for or not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.warm
def test_a_host_gets_a_learner_that_joins_and_the_run_goes_on_when_the_host_is_gone(tmp_path, memory):
    with Run(tmp_path, *_SMALL, messages=memory.handle(), tiny=()) as run:
        nodes = HostsWithoutRay("127.0.0.1", "127.0.0.2")
        with bridge(nodes, memory) as (made, events):
            made.turn()
            assert len(nodes.actors) == 1, "there is one learner more"
            run.wait_for(lambda: made.turn() or run.numbers().get("gossip_messages", 0) > 0.0, what="messages")
            there = nodes.actors[0]._run
            assert there.memory.newest_version(0) > (-1, -1), "it has messages too"
            near = {run.process.pid, *(one.pid for one in psutil.Process(run.process.pid).children(recursive=True))}
            family = [one for one in descendants() if one.pid not in near]
            assert len(family) >= 3, "a supervisor, a learner and a sampler"
            nodes.living = []
            poll(lambda: made.turn() or "host host-at-127.0.0.1 died; its learner is removed from the ring" in events)
            assert memory.living() == (0,)
            poll(lambda: not there.is_alive())
            poll(lambda: not any(map(runs, family)))  # all of its processes are gone
            before = run.numbers()["updates"]
            run.wait_for(lambda: run.numbers()["updates"] > before + 50, what="updates without it")
        assert run.stop()[0] == 0


def _side(memory, number):
    return memory.enter(number, topology="ring", max_staleness=None)


def _turned(made, condition, what):
    poll(lambda: made.turn() or condition(), what=what)


def test_a_learner_that_returns_begins_a_new_epoch_though_its_numbers_begin_anew(without_runs, memory):
    nodes = HostsWithoutRay("127.0.0.1")
    own = _side(memory, 0)
    own.send(np.zeros(2, np.float32), 1)
    with bridge(nodes, memory) as (made, _):
        made.turn()
        for start in range(2):
            if start == 1:  # Ray starts an actor anew whose process died
                nodes.actors[0]._run.memory.close()
                nodes.actors[0].__init__(made._secret, sign_json(made._secret, b"job", a_job().to_json()))
            _side(nodes.actors[0]._run.memory, 1).send(np.full(2, start, np.float32), 5 - start)
            _turned(
                made, lambda start=start: memory.newest_version(1) == (start, 5 - start), f"message of start {start}"
            )
            assert [message.parameters.tolist() for message in own.receive()] == [[start, start]]
            _turned(made, lambda: nodes.actors[0]._run.memory.newest_version(0) == (0, 1), "this host's message")


def test_a_learner_is_left_out_at_once_when_its_process_ends_and_after_a_while_when_its_host_is_silent(
    without_runs, memory, monkeypatch
):
    nodes, now_s = HostsWithoutRay("127.0.0.1"), [100.0]
    monkeypatch.setattr(gossip, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    with bridge(nodes, memory) as (made, _):
        made.turn()
        assert memory.living() == ()
        there = nodes.actors[0]._run.memory
        _side(memory, 0)
        _side(there, 1)
        _turned(made, lambda: memory.living() == there.living() == (0, 1), "both learners at both hosts")
        there.leave()
        _turned(made, lambda: memory.living() == (0,), "one learner alone")
        _side(there, 1)
        _turned(made, lambda: memory.living() == (0, 1), "both learners")
        now_s[0] += 0.9 * gossip.SILENT_S
        assert memory.living() == there.living() == (0, 1)
        now_s[0] += 0.2 * gossip.SILENT_S
        assert (memory.living(), there.living()) == ((0,), (1,))


def test_a_learner_whose_process_was_killed_is_not_there(memory, monkeypatch):
    child = subprocess.Popen(["sleep", "600"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: child.pid)
        _side(memory, 0)
    assert memory.living() == (0,)
    child.kill()
    child.wait()
    assert memory.living() == ()


def test_a_host_whose_learner_has_other_networks_is_given_up_and_told_why(without_runs, memory):
    nodes = HostsWithoutRay("127.0.0.1")
    _side(memory, 0).send(np.zeros(2, np.float32), 1)
    with bridge(nodes, memory) as (made, events):
        made.turn()
        _side(nodes.actors[0]._run.memory, 1).send(np.zeros(3, np.float32), 1)
        _turned(made, lambda: any("has no learner" in event for event in events), "that it is given up")
        assert "its learner 1 has 3 parameters, where learner 1 of this run has 2" in events[-1]
        assert memory.newest_version(1) == (-1, -1)


def test_messages_that_are_not_signed_or_of_an_earlier_start_are_not_stored(without_runs):
    there = GatewayActor(SECRET, sign_json(SECRET, b"job", a_job().to_json()))
    message, start = GossipMessage(0, 1, np.ones(2, np.float32)), there._run.start_name.encode()

    def given(secret, kind, message=message):
        return verify_json(SECRET, b"answer", there.give(sign_messages(secret, kind, [message])))

    assert "not signed" in given(b"x" * 32, b"give " + start)["failure"]
    assert "not signed" in given(SECRET, b"give of another start")["failure"]
    assert "not signed" in given(SECRET, b"listen " + start)["failure"]
    assert there._run.memory.newest_version(0) == (-1, -1)
    assert given(SECRET, b"give " + start) == {}
    assert there._run.memory.newest_version(0) == (0, 1)
    for sender in (1, 2, -1):
        failure = given(SECRET, b"give " + start, message._replace(sender=sender))["failure"]
        assert f"learner {sender} does not learn on another host" in failure
    assert there._run.memory.newest_version(1) == (-1, -1), "only its own learner writes there"
    assert there.listen(sign_json(b"x" * 32, b"listen", {"start": "", "after": [-1, -1]})) == b""
    there.end(sign_json(SECRET, b"end", {}))


def test_a_host_with_another_version_of_spreeze_gets_no_learner(memory, monkeypatch):
    monkeypatch.setattr(learner_bridge, "__version__", "9.9.9")
    nodes = HostsWithoutRay("127.0.0.1")
    with bridge(nodes, memory) as (made, events):
        _turned(made, lambda: any("has no learner" in event for event in events), "that it gets none")
    assert f"this host has Spreeze {__version__}, the run that it is to join has 9.9.9" in events[-1]


def test_a_place_that_has_failed_waits_before_it_is_tried_again(without_runs, memory):
    nodes = HostsWithoutRay("127.0.0.1")
    with bridge(nodes, memory) as (made, events):
        made.turn()
        nodes.actors[0]._run.failure = "no room"
        _turned(made, lambda: any("has no learner: no room" in event for event in events), "that it has failed")
        made.turn()
        assert len(nodes.actors) == 1


@pytest.mark.warm
def test_a_run_that_cannot_begin_on_a_host_is_given_up_and_told_why(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "_AGAIN_S", 0.0)
    run = HostRun(a_job(arguments=("--algo", "none-of-these")))
    run.start()
    told = []

    def gave_up():
        facts = run.facts()
        told.extend(facts["events"])
        return facts["failure"]

    assert "none-of-these" in poll(gave_up)
    run.end(PATIENCE_S)
    assert not run.is_alive()
    assert run.starts == len(told) == 4, "each end is told once"


def test_a_host_whose_driver_is_gone_ends_its_run_and_begins_again_when_it_is_asked(tmp_path, monkeypatch):
    lasting = tmp_path / "lasting"
    lasting.write_text("#!/bin/sh\nexec sleep 600\n", encoding="utf-8")
    lasting.chmod(0o700)
    monkeypatch.setattr(host, "_UNREQUESTED_S", 0.5)
    monkeypatch.setattr(host, "sys", SimpleNamespace(executable=str(lasting)))

    def runs():
        found = []
        for one in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                found += [one] if one.name() == "sleep" else []
        return found

    run = HostRun(a_job())
    run.start()
    try:
        poll(runs, what="a run")
        poll(lambda: not runs(), what="its end")
        assert run.is_alive()
        assert run.starts == 1
        facts = run.facts()
        assert (facts["events"], facts["failure"], facts["learns"]) == ([], None, False)
        poll(runs, what="another run")
    finally:
        run.end(PATIENCE_S)
    assert not run.is_alive()
    assert runs() == []


@pytest.mark.parametrize(("values", "told", "not_told"), [
    ({"a2c": {"hidden_sizes": (8, 8)}, "gala": {"topology": "full"}, "td3": {"gamma": 0.5}},
     ["a2c.hidden_sizes=[8, 8]", 'gala.topology="full"'], ["learner.device", "td3.gamma=0.5"]),
    ({"learner": {"device": "cpu", "publish_interval_s": 1.0}, "stop": {"seconds": 9.0}},
     ["learner.publish_interval_s=1.0"], ["learner.device=\"cpu\"", "stop.seconds=9.0"]),
])  # fmt: skip
def test_a_host_has_the_settings_of_the_run_but_not_those_of_this_machine(values, told, not_told):
    asked = {
        "run": {"algo": "a2c", "mode": "gala", "seed": 7},
        "env": {"id": "CartPole-v1"},
        "cluster": {"samplers": 3},
    }
    settings = resolve([Layer("user", asked | values)])
    flags = RunPlan(settings=settings, spec=SPEC, samplers=1, all_learners=2, free_core=False).host_arguments
    assert set(told) <= set(flags)
    assert not set(not_told) & set(flags)
    assert flags[flags.index("--seed") + 1] == "7"
    assert flags[flags.index("--samplers") + 1] == "3"
    assert flags[flags.index("--learners") + 1] == "1"
    assert flags[flags.index("--profile") + 1] == "none", "what is default here would be the task's profile's there"


@pytest.mark.warm
@pytest.mark.slow
def test_a_cluster_of_ray_gives_the_run_learners_on_its_hosts_and_ends_them_with_it(tmp_path):
    pytest.importorskip("ray")
    with Run(tmp_path, *_SMALL, "--cluster", "local:1", "--host-samplers", "1", tiny=()) as run:
        run.wait_for(lambda: run.numbers().get("gossip_messages", 0) > 0.3, what="messages of the host's learner")
        assert any("starts a learner" in event for event in run.events())
        code, document = run.stop()
    assert (code, document["error"], document["restarts"]) == (0, None, 0)
