"""The bridge and the gateways without Ray: references are made here, and answered, lost or refused as a test wants."""

import contextlib
import dataclasses
import itertools
import json
import os
import socket
import threading
import time

import numpy as np
import psutil
import pytest
from fault_envs import count_numbered
from harness import poll

from spreeze.config.schema import SamplingConfig
from spreeze.envs.task import make_task
from spreeze.errors import ConfigError, TransportError
from spreeze.machine.hardware import core_facts
from spreeze.metrics.table import SLOTS
from spreeze.runtime.cluster.host import GatewayActor, HostSamplers, sum_counters
from spreeze.runtime.cluster.ray_nodes import GatewayDied, Node, check_installed, check_reachable, parse_address
from spreeze.runtime.cluster.row_bridge import RowBridge
from spreeze.transport.chunks import Taken, sign, sign_chunk, sign_json, verify_chunk, verify_json
from spreeze.transport.rate_limiter import RateLimiter
from spreeze.transport.replay_ring import ReplayRing, RingHandle, RingSpec
from spreeze.transport.status_table import StatusTable
from spreeze.transport.weights import WeightsStore, encode
from spreeze.types import RowLayout
from spreeze.workers.context import WorkerContext
from spreeze.workers.jobs import HostJob, RowBridgeJob
from spreeze.workers.roles import Address

SECRET = bytes(32)
FREE = RateLimiter(0.0, 512.0, 10, 64, 8)
MODULE = "fault_envs"


@pytest.fixture(scope="module")
def spec():
    task = make_task("spreeze/Numbered-v0", MODULE)
    task.close()
    return dataclasses.replace(task.spec, import_module=MODULE)


@pytest.fixture
def job(spec):
    return HostJob(spec=spec, layout=RowLayout.of(spec, 1), n_step=1, gamma=0.99, nan_policy="drop", seed=3,
                   sampling=SamplingConfig(envs_per_sampler=2), samplers=2)  # fmt: skip


def told(answer):
    return verify_json(SECRET, b"answer", answer)


@contextlib.contextmanager
def gateway(job):
    made = GatewayActor(SECRET, sign_json(SECRET, b"job", job.to_json() if job else {}))
    try:
        yield made
    finally:
        assert told(made.end(sign_json(SECRET, b"end", {})))["ended"]


class Stream:
    """What a driver takes from one gateway: its chunks, and how far it lets it go on."""

    def __init__(self, gateway, layout):
        self.gateway, self.layout, self.ring_id, self.rows, self.events = gateway, layout, 0, [], []

    def pull(self, allowed=None):
        allowed = len(self.rows) + 1000 if allowed is None else allowed
        request = {"ring_id": self.ring_id, "allowed": allowed}
        chunk = verify_chunk(SECRET, self.layout, self.gateway.pull(sign_json(SECRET, b"pull", request)))
        self.events += chunk.facts["events"]
        if chunk.ring_id:
            self.ring_id = chunk.ring_id
            assert chunk.first == len(self.rows)
            self.rows += list(chunk.rows)
        return chunk

    def until(self, count):
        poll(lambda: (self.pull(), len(self.rows) >= count)[1])
        return np.array(self.rows)


@pytest.mark.warm
def test_a_gateway_gives_each_row_of_its_samplers_once_while_they_are_killed(job):
    with gateway(job) as there:
        stream = Stream(there, job.layout)
        stream.until(500)
        handles = there._samplers._workers.handles
        for name in handles:
            psutil.Process(handles[name].process.pid).kill()
            poll(lambda name=name: (stream.pull(), any(name in event for event in stream.events))[1])
            before = len(stream.rows)
            rows = stream.until(before + 300)
        assert count_numbered(rows, job.layout) == (0, 0)
        assert len(handles) == 2
        env_steps = stream.pull().facts["slots"]["env_steps"]
        assert env_steps >= len(rows) - 8, "steps and rows are counted at different moments"
        folder = there._samplers._folder
        assert folder.is_dir()
    assert not folder.exists()
    assert all(handle.process is None for handle in handles.values())


@pytest.mark.warm
def test_a_host_gives_the_rows_with_other_goals_and_counts_only_the_env_steps():
    spec = make_task("BitFlip-v0", "goal_tasks").spec
    job = HostJob(spec=spec, layout=RowLayout.of(spec, 1), n_step=1, gamma=0.99, nan_policy="drop", seed=3,
                  sampling=SamplingConfig(envs_per_sampler=2), samplers=2, her="final", rows_per_step=2)  # fmt: skip
    with gateway(job) as made:
        stream = Stream(made, job.layout)
        poll(lambda: (stream.pull(allowed=2000), len(stream.rows) > 2004)[1])  # they wait from there on
        steps = poll(lambda: (found := made._samplers.facts()["slots"]["env_steps"]) >= 1002 and found)
    episodes = 4 * 20  # of all environments: one is not over, and rows of another may wait
    assert 2 * steps - 2 * episodes <= len(stream.rows) <= 2 * steps


@pytest.mark.warm
def test_samplers_of_a_host_do_not_go_on_further_than_the_driver_allows(job):
    with gateway(job) as there:
        stream = Stream(there, job.layout)
        poll(lambda: stream.pull(allowed=0).ring_id)
        slack = 2 * 2 * 2  # what two samplers may write before and between two looks
        for allowed, most in ((0, 0), (0, 0), (100, 100), (100, 100), (0, 100)):
            stream.pull(allowed)
            assert len(stream.rows) <= most + slack
        poll(lambda: (stream.pull(allowed=0), len(stream.rows) >= 100)[1])
        assert len(stream.rows) <= 100 + slack
        before = len(stream.rows)
        request = {"ring_id": stream.ring_id + 1, "allowed": 10**6}  # meant for another ring: it does not count
        chunk = verify_chunk(SECRET, job.layout, there.pull(sign_json(SECRET, b"pull", request)))
        assert before + len(chunk.rows) <= 100 + slack


def test_a_gateway_does_nothing_for_who_does_not_know_the_secret(job):
    with gateway(job) as there:
        stranger = sign_json(bytes(range(32)), b"pull", {"ring_id": 0, "allowed": 10**6})
        chunk = verify_chunk(SECRET, job.layout, there.pull(stranger))
        assert (chunk.ring_id, len(chunk.rows)) == (0, 0)
        assert "signed" in chunk.facts["failure"]
        for method in ("weights", "ping", "check", "end"):
            assert "signed" in told(getattr(there, method)(stranger))["failure"]
        assert there.bandwidth(stranger) == b""
        assert there._samplers.is_alive(), "the end was not meant"
    imposter = GatewayActor(SECRET, stranger)
    assert "signed" in verify_chunk(SECRET, job.layout, imposter.pull(sign_json(SECRET, b"pull", {}))).facts["failure"]


def test_a_host_takes_what_its_own_tuner_says_and_goes_by_its_cores_where_that_fails(job, monkeypatch, tmp_path):
    said = tmp_path / "said.json"
    monkeypatch.setattr("spreeze.runtime.cluster.host._TUNER", ("-c", f"print(open({str(said)!r}).read())"))
    asked = dataclasses.replace(job, samplers=None, tune=("--env", job.spec.env_id))
    choice = {"sampling.samplers": 37, "sampling.envs_per_sampler": 3}
    by_cores = max(1, int(core_facts().usable)), asked.sampling.envs_per_sampler
    for text, expected, told in (
        (json.dumps({"choice": choice}, indent=1), (37, 3), 0),
        (json.dumps({"error": "no time"}), by_cores, 1),
        ("nonsense", by_cores, 1),
    ):
        said.write_text(text)
        samplers = HostSamplers(asked, 1)
        assert samplers._choose("nonce") == expected
        assert sum("not tuned here" in event for event in samplers.facts()["events"]) == told


@pytest.mark.warm
def test_a_host_keeps_no_more_versions_of_the_weights_than_a_run(job, monkeypatch):
    monkeypatch.setitem(WeightsStore.__init__.__kwdefaults__, "min_age_s", 0.0)
    weight = {"w0": np.zeros((3, 2), np.float32)}
    with gateway(job) as there:
        Stream(there, job.layout).until(1)
        for version in range(1, 13):
            data = encode(weight, {}, 1, version)
            assert told(there.weights(sign(SECRET, b"weights", data)))["weights"] == [1, version]
        assert 1 <= len(list(there._samplers._folder.glob("weights/w-*"))) <= 4


@pytest.mark.warm
def test_samplers_that_nobody_asks_for_rows_end_and_begin_again_when_somebody_does(job, monkeypatch):
    monkeypatch.setattr("spreeze.runtime.cluster.host._UNREQUESTED_S", 0.5)
    with gateway(job) as there:
        stream = Stream(there, job.layout)
        stream.until(50)
        first = there._samplers
        handles = first._workers.handles.values()
        poll(lambda: not first.is_alive() and all(handle.process is None for handle in handles))
        assert first.failure is None
        again = Stream(there, job.layout)
        rows = again.until(50)
        assert again.ring_id != stream.ring_id
        assert count_numbered(rows, job.layout) == (0, 0)


def test_a_host_that_cannot_make_the_environment_says_why(job, spec):
    broken = dataclasses.replace(job, spec=dataclasses.replace(spec, import_module="no_such_module"), samplers=1)
    with gateway(broken) as there:
        stream = Stream(there, job.layout)
        poll(lambda: (stream.pull(), any("no_such_module" in event for event in stream.events))[1])
        assert stream.rows == []


def test_a_look_at_a_host_tells_what_it_has(spec):
    with gateway(None) as there:
        task = {"env_id": spec.env_id, "import_module": MODULE}
        found = told(there.check(sign_json(SECRET, b"check", task)))
        assert (found["env"]["obs_dim"], found["env_error"]) == (3, None)
        assert {"spreeze", "torch", "gymnasium"} <= set(found["versions"])
        assert found["cores"] > 0
        assert len(there.bandwidth(sign_json(SECRET, b"bandwidth", {"bytes": 1000}))) == 1000
        missing = told(there.check(sign_json(SECRET, b"check", {"env_id": "NoSuchTask-v0"})))
        assert "NoSuchTask" in missing["env_error"]


def test_several_samplers_look_like_one():
    blank = dict.fromkeys(SLOTS["sampler"], 0.0)
    rows = [blank | {"env_steps": 5.0, "episodes": 1.0, "episode_return": 4.0}, blank | {"env_steps": 7.0},
            blank | {"env_steps": 1.0, "episodes": 2.0, "episode_return": 8.0}]  # fmt: skip
    found = sum_counters(rows)
    assert (found["env_steps"], found["episodes"], found["episode_return"]) == (13.0, 3.0, 6.0)
    assert sum_counters([blank])["episode_return"] == 0.0


# --- the bridge ---


class NodesDouble:
    """Ray as far as the bridge knows it; a test answers, loses or holds back each reference."""

    version, address, is_authenticated = "0", "127.0.0.1:1", True

    def __init__(self):
        self.living, self.gateways, self.shared = [], {}, []
        self.held, self.broken, self._numbers = set(), {}, itertools.count()

    def others(self):
        return list(self.living)

    def place(self, node, secret, job):
        self.secret = secret
        self.gateways[node.id] = GatewayDouble(self, secret, verify_json(secret, b"job", job))
        return self.gateways[node.id]

    def drop(self, gateway):
        gateway.dropped = True

    def share(self, data):
        self.shared.append(data)
        return data

    def ready(self, references, timeout_s):
        return [one for one in references if one[0] not in self.held]

    def answer(self, reference, timeout_s=5.0):
        gateway = reference[1]
        if gateway.error is not None:
            raise type(gateway.error)(str(gateway.error))
        return reference[2]()


class GatewayDouble:
    """A gateway with rows of its own making."""

    rings = itertools.count(1)

    def __init__(self, nodes, secret, job):
        self.nodes, self.secret, self.job = nodes, secret, job
        self.ring_id, self.first, self.allowed, self.weights = next(self.rings), 0, 0, []
        self.error, self.dropped, self.facts, self.rate = None, False, {}, 10
        self.requests = []

    def restart(self):
        self.ring_id, self.first, self.allowed, self.error = next(self.rings), 0, 0, None

    def pull(self, request):
        asked = verify_json(self.secret, b"pull", request)
        self.requests.append(asked)
        if asked["ring_id"] == self.ring_id:
            self.allowed = asked["allowed"]
        return next(self.nodes._numbers), self, self._chunk

    def _chunk(self):
        layout = RowLayout(obs_dim=3, action_dim=1)
        count = min(self.rate, max(2 if self.first == 0 else 0, self.allowed - self.first))
        rows = np.zeros((count, layout.width), np.float32)
        rows[:, layout.reward], rows[:, 0] = np.arange(self.first, self.first + count), self.ring_id
        slots = dict.fromkeys(SLOTS["sampler"], 0.0) | {"env_steps": float(self.first + count)}
        first, self.first = self.first, self.first + count
        taken = Taken([rows.reshape(-1).view(np.uint8).data] if count else [], [(count, 0)] if count else [])
        return sign_chunk(self.secret, self.ring_id, first, taken, {"events": [], "slots": slots, **self.facts})

    def call(self, method, request):
        if method == "pull":
            return self.pull(request)

        def answer():
            if method == "weights":
                self.weights.append(request)
                return sign_json(self.secret, b"answer", {"weights": self.told, "time_s": 0.0})
            return sign_json(self.secret, b"answer", {"came_s": 0.0, "went_s": 0.0})

        return next(self.nodes._numbers), self, answer

    told = (1, 5)


class Scene:
    def __init__(self, folder, spec, hosts=2, shards=2, limiter=FREE):
        self.status = StatusTable.create(hosts + 1)
        layout = RowLayout(obs_dim=3, action_dim=1)
        self.ring = ReplayRing.create(RingSpec(layout, 1 + shards, 4000))
        self.nodes, self.sent = NodesDouble(), []
        context = WorkerContext(Address("bridge"), self.status, hosts, None)
        context.send = lambda kind, **fields: self.sent.append(fields.get("text", ""))
        host = HostJob(spec=spec, layout=layout, n_step=1, gamma=0.99, nan_policy="drop", seed=3,
                       sampling=SamplingConfig(envs_per_sampler=2))  # fmt: skip
        self.job = RowBridgeJob(address="local:2", run_dir=str(folder), replay=self.ring.handle,
                             first_shard=1, limiter=limiter, host=host, host_rows=tuple(range(hosts)))  # fmt: skip
        self.context = context
        self.bridge = self.open()

    def open(self):
        self.fd = os.dup(self.ring.fd)  # the bridge owns its descriptor
        replay = RingHandle(fds=(self.fd,), spec=self.ring.spec)
        return RowBridge(self.context, dataclasses.replace(self.job, replay=replay), self.nodes)

    def join(self, *names):
        self.nodes.living += [Node(name, "127.0.0.1", name) for name in names]
        self.look()

    def leave(self, name):
        self.nodes.living = [node for node in self.nodes.living if node.id != name]
        self.look()

    def look(self):
        self.bridge._nodes_s = -10.0
        self.bridge.turn()

    def turns(self, count):
        for _ in range(count):
            for host in self.bridge._hosts:
                host.resume_s = host.requested_s = 0.0
            self.bridge.turn()
            for host in self.bridge._hosts:  # as if the pace were over already
                host.requested_s = 0.0
                if host.gateway is not None:
                    self.bridge._request(host, time.monotonic())

    def stored(self):
        """(ring, number) of every row in the ring."""
        spec, found = self.ring.spec, []
        for shard, (_, committed) in enumerate(self.ring.counters()):
            rows = self.ring.rows[shard * spec.stride_rows :][:committed]
            found += list(zip(rows[:, 0].tolist(), rows[:, spec.layout.reward].tolist(), strict=True))
        return found

    def numbers(self, row):
        return self.status.named_slots(row, "host")

    def close(self):
        self.bridge._ring.close()
        del self.bridge  # whose sinks hold the memory
        self.ring.close()
        self.context.close()


@pytest.fixture
def scene(tmp_path, spec):
    made = Scene(tmp_path, spec)
    yield made
    made.close()


def test_rows_of_all_hosts_go_into_the_shards_of_the_bridge_each_once_and_evenly(scene):
    scene.join("a", "b")
    scene.turns(50)
    stored = scene.stored()
    assert len(stored) == len(set(stored)) > 800
    first, *own = [committed for _, committed in scene.ring.counters()]
    assert first == 0, "the shard of a local sampler"
    assert max(own) - min(own) <= 20
    assert [scene.numbers(row)["alive"] for row in (0, 1)] == [1.0, 1.0]
    assert sum(scene.numbers(row)["env_steps"] for row in (0, 1)) == len(stored)
    assert ["a) joins" in text or "b) joins" in text for text in scene.sent[1:]] == [True, True]


def test_at_most_two_pulls_are_under_way_to_a_host_and_answers_count_in_their_order(scene):
    scene.join("a")
    scene.turns(5)
    oldest = scene.bridge._hosts[0].pulls[0][0]
    scene.nodes.held = {oldest[0]}
    before = scene.stored()
    scene.turns(5)
    assert len(scene.bridge._hosts[0].pulls) == 2
    assert scene.stored() == before, "the second answer waits for the first"
    scene.nodes.held = set()
    scene.turns(2)
    assert len(scene.stored()) > len(before)


def test_a_dead_node_is_named_its_chunks_count_as_lost_and_it_comes_back_under_its_number(scene):
    scene.join("a", "b")
    scene.turns(10)
    before = len(scene.stored())
    scene.leave("a")
    assert any("host-0 (a) died; 2 chunks on the way lost" in text for text in scene.sent)
    assert scene.numbers(0)["chunks_lost"] == 2.0
    assert scene.numbers(0)["alive"] == 0.0
    assert scene.nodes.gateways["a"].dropped
    steps = scene.numbers(0)["env_steps"]
    scene.turns(10)
    assert len(scene.stored()) > before, "the run goes on"
    scene.join("c")
    scene.turns(10)
    assert scene.bridge._hosts[0].node.id == "c"
    assert scene.numbers(0)["env_steps"] > steps, "counters go on over rings"
    assert scene.numbers(0)["alive"] == 1.0
    stored = scene.stored()
    assert len(stored) == len(set(stored))


def test_a_gateway_that_is_not_available_is_waited_for_and_begins_a_new_ring(scene):
    scene.join("a")
    scene.turns(10)
    there = scene.nodes.gateways["a"]
    there.error = TransportError("ActorUnavailableError: it restarts")
    scene.turns(3)
    assert scene.numbers(0)["chunks_lost"] >= 2.0
    assert sum("not available" in text for text in scene.sent) == 1
    there.restart()
    scene.turns(10)
    assert any("host-0 (a) is back" in text for text in scene.sent)
    stored = scene.stored()
    assert len(stored) == len(set(stored))
    assert len({ring for ring, _ in stored}) == 2
    assert scene.numbers(0)["rows_again"] == 0.0


def test_a_node_whose_gateway_dies_with_it_is_named_as_dead(scene):
    scene.join("a", "b")
    scene.turns(10)
    scene.nodes.gateways["a"].error = GatewayDied("ActorDiedError: its node died")
    scene.nodes.living = scene.nodes.living[1:]
    scene.turns(2)
    assert any("host-0 (a) died; 2 chunks on the way lost" in text for text in scene.sent)
    assert scene.numbers(0)["chunks_lost"] == 2.0


@pytest.mark.parametrize("how", ["told", "died"])
def test_a_host_that_cannot_work_is_named_once_and_tried_again_later(scene, how):
    scene.join("a")
    there = scene.nodes.gateways["a"]
    if how == "told":
        there.facts = {"failure": "no such module"}
    else:
        there.error = GatewayDied("ActorDiedError: no such module")
    scene.turns(2)
    assert there.dropped
    scene.look()
    assert scene.bridge._hosts[0].gateway is None, "not at once"
    (why,) = [text for text in scene.sent if "cannot sample" in text]
    assert "no such module" in why
    scene.bridge._failed["a"] = (-100.0, scene.bridge._failed["a"][1])
    scene.look()
    assert scene.nodes.gateways["a"] is not there
    scene.turns(5)
    assert scene.numbers(0)["alive"] == 1.0


def test_what_is_not_signed_is_lost_and_not_stored(scene):
    scene.join("a")
    scene.turns(5)
    before = scene.stored()
    scene.nodes.gateways["a"].secret = bytes(32)
    scene.nodes.gateways["a"].pull = lambda request: (next(scene.nodes._numbers), scene.nodes.gateways["a"],
                                                      scene.nodes.gateways["a"]._chunk)  # fmt: skip
    scene.turns(5)
    assert scene.numbers(0)["chunks_lost"] > 0
    assert len(scene.stored()) - len(before) <= 20, "only what was under way before"
    assert any("not signed" in text for text in scene.sent)


def test_hosts_write_no_more_than_the_run_s_rate_limiter_allows(tmp_path, spec):
    limiter = RateLimiter(8.0, 512.0, 100, 64, 8)
    scene = Scene(tmp_path, spec, limiter=limiter)
    try:
        scene.join("a", "b")
        scene.turns(60)
        assert len(scene.stored()) <= 100 + 8 + 4, "until learning begins: what it waits for, and a write of each host"
        scene.ring.begin_learning()
        scene.ring.rows_drawn += 800
        before = len(scene.stored())
        scene.turns(60)
        assert before + 90 <= len(scene.stored()) <= before + 100 + 8 + 1
    finally:
        scene.close()


def test_pulls_of_a_host_are_paced_and_wait_longer_with_more_hosts(scene):
    scene.join("a")
    bridge, there = scene.bridge, scene.nodes.gateways["a"]
    bridge._hosts[0].pulls.clear()
    there.requests.clear()
    bridge._hosts[0].requested_s = now = time.monotonic()
    for later_s, count in ((0.05, 0), (0.09, 1), (0.12, 1), (0.18, 2), (0.27, 2)):
        bridge._request(bridge._hosts[0], now + later_s)
        assert len(there.requests) == count
    assert {request["linger_s"] for request in there.requests} == {0.1}


def test_chunks_of_many_hosts_are_larger(tmp_path, spec):
    scene = Scene(tmp_path, spec, hosts=4)
    try:
        scene.join("a", "b", "c", "d")
        scene.turns(3)
        assert scene.nodes.gateways["d"].requests[-1]["linger_s"] == pytest.approx(0.2)
    finally:
        scene.close()


def test_each_version_of_the_weights_is_shared_once_and_given_to_every_host(scene, tmp_path):
    scene.join("a", "b")
    scene.turns(3)
    store = WeightsStore(tmp_path / "weights")
    store.publish({"w": np.ones(3, np.float32)}, {}, 1, 5)
    scene.context.weights_published()
    scene.turns(6)
    assert len(scene.nodes.shared) == 1
    assert [len(scene.nodes.gateways[name].weights) for name in "ab"] == [1, 1]
    scene.nodes.gateways["a"].error = TransportError("gone")
    scene.turns(2)
    scene.nodes.gateways["a"].restart()
    scene.turns(6)
    assert len(scene.nodes.gateways["a"].weights) >= 2, "a new process has none"
    assert len(scene.nodes.shared) == 1


def test_a_new_bridge_counts_what_its_predecessor_had_under_way_as_lost_and_goes_on_counting(scene):
    scene.join("a", "b")
    scene.turns(10)
    steps, chunks, stored = (scene.numbers(0)[name] for name in ("env_steps", "chunks", "rows_arrived"))
    scene.bridge._ring.close()
    scene.nodes = NodesDouble()
    scene.bridge = None
    scene.bridge = scene.open()
    assert scene.numbers(0)["chunks_lost"] == 2.0
    scene.join("a", "b")
    scene.turns(10)
    after = [scene.numbers(0)[name] for name in ("env_steps", "chunks", "rows_arrived")]
    assert all(new > old for new, old in zip(after, (steps, chunks, stored), strict=True))
    rows = scene.stored()
    assert len(rows) == len(set(rows))


# --- addresses ---


@pytest.mark.parametrize("text", ["", "nonsense", "host:", "host:x", "host:70000", "local:0", "local:x", "local:1000",
                                  "ray://host:10001", ":6379"])  # fmt: skip
def test_an_address_that_is_none_is_refused_with_what_is_expected(text):
    with pytest.raises(ConfigError, match=r"expected .*local:N"):
        parse_address(text)


def test_addresses():
    assert parse_address("local").local == 2
    assert parse_address("local:7").local == 7
    assert parse_address("auto") == ("auto", 0)
    assert parse_address("10.1.2.3:6379") == ("10.1.2.3:6379", 0)


def test_an_address_where_nothing_listens_is_refused_at_once():
    with pytest.raises(ConfigError, match=r"no answer .*ray start --head"):
        check_reachable(parse_address("127.0.0.1:9"))


def test_a_server_that_is_no_ray_head_is_refused_at_once():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ConfigError, match="this is not a Ray head node"):
            check_reachable(parse_address(f"127.0.0.1:{server.getsockname()[1]}"))
        thread.join()


def test_without_ray_a_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'spreeze\[cluster\]'"):
        check_installed()
