"""Learners on other hosts: the bridge gives each living host a run that joins, and hears how it fares; without Ray."""

import contextlib
from types import SimpleNamespace

import psutil
import pytest
from harness import HIDDEN_SIZES, PATIENCE_S, Run, poll

from spreeze.config.layers import Layer, resolve
from spreeze.runtime.cluster import host_run
from spreeze.runtime.cluster.gateway import GatewayActor
from spreeze.runtime.cluster.host_run import HostRun, HostRunJob
from spreeze.runtime.cluster.learner_bridge import LearnerBridge
from spreeze.runtime.cluster.ray_nodes import Node
from spreeze.runtime.plan import RunPlan
from spreeze.transport.gossip import GlooPlace, create_secret
from spreeze.types import Choices, EnvSpec
from spreeze.workers.jobs import LearnerBridgeJob

SPEC = EnvSpec(env_id="CartPole-v1", import_module=None, obs_dim=4, action=Choices((2,)),
               max_episode_steps=500, reward_threshold=None)  # fmt: skip
_SMALL = ("--env", "CartPole-v1", "--algo", "a2c", "--mode", "gala", "--envs-per-sampler", "2", "--sync-interval", "8",
          "--samplers", "1", "--set", f"a2c.hidden_sizes={HIDDEN_SIZES}", "--set", "evaluation.episodes=2",
          "--no-visualizer", "--no-governor", "--set", "exchange.transport=gloo")  # fmt: skip


class HostsWithoutRay:
    """Nodes whose gateways are objects of this process; calls are answered at once."""

    def __init__(self, *addresses):
        self.address, self.version = "here", "none"
        self.living = [Node(address, address, f"host-at-{address}") for address in addresses]
        self.actors = []

    def others(self):
        return self.living

    def place(self, node, secret, job):
        self.actors.append(GatewayActor(secret, job))
        actor = self.actors[-1]
        return SimpleNamespace(actor=actor, call=lambda method, request: getattr(actor, method)(request))

    def drop(self, gateway):
        if gateway.actor._run is not None:
            gateway.actor._run.end(PATIENCE_S)

    def ready(self, references, timeout_s):
        return list(references)

    def answer(self, reference):
        return reference


class Told:
    """What of a worker's context the bridge needs."""

    stopping = False

    def __init__(self):
        self.events = []

    def beat(self, phase):
        pass

    def event(self, level, text):
        self.events.append(text)


@contextlib.contextmanager
def bridge(nodes, place, arguments=_SMALL):
    context = Told()
    made = LearnerBridge(context, LearnerBridgeJob(address="here", place=place, arguments=arguments), nodes)
    try:
        yield made, context.events
    finally:
        made.close()


def a_place(folder, **changed):
    create_secret(folder / "secret")
    facts = {"store": "127.0.0.1:1", "secret_file": str(folder / "secret"), "listen": "127.0.0.1", "learners": 3,
             "own": (0,)}  # fmt: skip
    return GlooPlace(**facts | changed)


def test_a_host_gets_a_learner_that_joins_and_the_run_goes_on_when_the_host_is_gone(tmp_path):
    with Run(tmp_path, *_SMALL, "--set", "exchange.learners=2", tiny=()) as run:
        run.wait_for((run.path / "secret").exists, what="the secret")
        run.wait_for(lambda: any("exchange.join=" in event for event in run.events()), what="where to join")
        told = next(event for event in run.events() if "exchange.join=" in event)
        place = GlooPlace(
            store=told.partition("exchange.join=")[2].split()[0],
            secret_file=str(run.path / "secret"),
            listen="127.0.0.1",
            learners=2,
            own=(0,),
        )
        nodes = HostsWithoutRay("127.0.0.1", "127.0.0.2")
        with bridge(nodes, place) as (made, events):
            made.turn()
            assert len(nodes.actors) == 1, "there is one learner more"
            run.wait_for(lambda: made.turn() or run.numbers().get("gossip_messages", 0) > 0.3, what="messages")
            family = psutil.Process().children(recursive=True)
            nodes.living = []
            made.turn()
            assert "host host-at-127.0.0.1 died; the ring closes over its learner" in events
            poll(lambda: not nodes.actors[0]._run.is_alive())
            left = [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE
                    and "host-1" in " ".join(one.cmdline())]  # fmt: skip
            assert left == [], "all of its processes are gone"
            before = run.numbers()["updates"]
            run.wait_for(lambda: run.numbers()["updates"] > before + 50, what="updates without it")
        assert run.stop()[0] == 0


def test_a_host_that_cannot_reach_the_learners_is_told_what_to_set(tmp_path):
    nodes = HostsWithoutRay("10.1.2.3")
    with bridge(nodes, a_place(tmp_path)) as (made, events):
        for _ in range(3):
            made.turn()
    assert [event for event in events if "10.1.2.3" in event] == [
        "host 10.1.2.3 cannot reach this one's learners, which listen at 127.0.0.1:1 alone; set exchange.listen to "
        "this machine's address in the cluster"
    ]
    assert nodes.actors == []


def test_a_run_that_cannot_begin_on_a_host_is_given_up_and_told_why(tmp_path, monkeypatch):
    monkeypatch.setattr(host_run, "_AGAIN_S", 0.0)
    run = HostRun(HostRunJob(arguments=("--algo", "none-of-these"), secret="00" * 32))
    run.start()
    told = []

    def gave_up():
        facts = run.facts()
        told.extend(facts["events"])
        return facts["failure"]

    assert "none-of-these" in poll(gave_up)
    run.join(PATIENCE_S)
    assert not run.is_alive()
    assert run.starts == len(told) == 4, "each end is told once"


def test_a_host_whose_driver_is_gone_ends_its_run_and_begins_again_when_it_is_asked(tmp_path, monkeypatch):
    lasting = tmp_path / "lasting"
    lasting.write_text("#!/bin/sh\nexec sleep 600\n", encoding="utf-8")
    lasting.chmod(0o700)
    monkeypatch.setattr(host_run, "_FORSAKEN_S", 0.5)
    monkeypatch.setattr(host_run, "sys", SimpleNamespace(executable=str(lasting)))

    def runs():
        found = []
        for one in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                found += [one] if one.name() == "sleep" else []
        return found

    run = HostRun(HostRunJob(arguments=(), secret="00" * 32))
    run.start()
    try:
        poll(runs, what="a run")
        poll(lambda: not runs(), what="its end")
        assert run.is_alive()
        assert run.starts == 1
        assert run.facts() == {"events": [], "failure": None}
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
    settings = resolve([Layer("user", {"run": {"algo": "a2c", "mode": "gala", "seed": 7},
                                       "env": {"id": "CartPole-v1"}, "cluster": {"samplers": 3},
                                       "exchange": {"transport": "gloo", "learners": 2}, **values})])  # fmt: skip
    flags = RunPlan(settings=settings, spec=SPEC, samplers=1, free_core=False).host_arguments
    assert set(told) <= set(flags)
    assert not set(not_told) & set(flags)
    assert flags[flags.index("--seed") + 1] == "7"
    assert flags[flags.index("--samplers") + 1] == "3"
    assert flags[flags.index("--learners") + 1] == "1"
    assert flags[flags.index("--profile") + 1] == "none", "what is default here would be the task's profile's there"


@pytest.mark.slow
def test_a_cluster_of_ray_gives_the_run_learners_on_its_hosts_and_ends_them_with_it(tmp_path):
    pytest.importorskip("ray")
    flags = [flag for flag in _SMALL if flag != "exchange.transport=gloo"][:-1]
    with Run(tmp_path, *flags, "--cluster", "local:1", "--host-samplers", "1", tiny=()) as run:
        run.wait_for(lambda: run.numbers().get("gossip_messages", 0) > 0.3, what="messages of the host's learner")
        assert any("gets a learner" in event for event in run.events())
        code, document = run.stop()
    assert (code, document["error"], document["restarts"]) == (0, None, 0)
