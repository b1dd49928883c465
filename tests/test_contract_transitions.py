"""TransitionSink and BatchSource: rows arrive whole, in order and once, in this process, from others, over sockets."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from harness import REPO, poll

from spreeze.errors import TransportError
from spreeze.transport.protocols import FrameColumns
from spreeze.transport.replay_ring import ReplayReader, ReplayRing, RingSpec, ShardWriter
from spreeze.transport.socket_sink import Gateway, SocketSink, create_secret, read_secret
from spreeze.types import RowLayout

LAYOUT = RowLayout(obs_dim=3, action_dim=2, n_step=3, checksum=True)
IMAGES = RowLayout(obs_dim=0, action_dim=1, checksum=True, frame_bytes=6, stack=2)
SHARDS, ROWS = 2, 256

WRITER = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, os.path.join(os.environ["PYTHONPATH"], "tests"))
from test_contract_transitions import put
from spreeze.transport.socket_sink import SocketSink, read_secret
from spreeze.transport.replay_ring import ReplayRing, RingSpec, ShardWriter
where = json.loads(sys.argv[1])
spec = RingSpec.from_json(where["ring"])
if "fd" in where:
    sink = ShardWriter(ReplayRing.attach(where["fd"], spec), 0)
else:
    sink = SocketSink(where["address"], read_secret(Path(where["secret"])), spec.layout, 0)
while True:
    sink.counts()
    if sink.has_room:
        put(sink, 8)
"""


class Memory:
    """A ring in this process."""

    def __init__(self, folder, layout, locked):
        self.ring, self.folder = ReplayRing.create(RingSpec(layout, SHARDS, ROWS), locked=locked), folder

    def sink(self, shard=0):
        return ShardWriter(self.ring, shard)

    def address(self):
        return {"fd": self.ring.fd}, (self.ring.fd,)

    def close(self):
        self.ring.close()


class Remote(Memory):
    """A ring behind a gateway, which a thread turns."""

    def __init__(self, folder, layout, address):
        super().__init__(folder, layout, None)
        self.secret = create_secret(folder / "secret")
        self.sinks, self.where = [], address
        self.start()

    def start(self):
        self.gateway = Gateway(self.where, self.secret, self.ring.spec.layout, super().sink)
        self.where, self.ending = self.gateway.address, threading.Event()
        self.thread = threading.Thread(target=self.serve, args=(self.gateway, self.ending))
        self.thread.start()

    @staticmethod
    def serve(gateway, ending):
        while not ending.is_set():
            gateway.turn(0.005)
        gateway.close()

    def stop(self):
        """As if the gateway had been killed: what it has not written is lost, its memory is not."""
        self.ending.set()
        self.thread.join()

    def sink(self, shard=0, secret=None, layout=None, **options):
        made = SocketSink(self.where, secret or self.secret, layout or self.ring.spec.layout, shard, **options)
        self.sinks.append(made)
        return made

    def address(self):
        return {"address": self.where, "secret": str(self.folder / "secret")}, ()

    def close(self):
        for sink in self.sinks:
            sink.close()
        self.stop()
        super().close()


IMPLEMENTATIONS = {
    "ring": lambda folder, layout: Memory(folder, layout, False),
    "ring with locks": lambda folder, layout: Memory(folder, layout, True),
    "unix socket": lambda folder, layout: Remote(folder, layout, f"unix:{folder}/gateway"),
}


@contextlib.contextmanager
def opened(name, folder, layout=LAYOUT):
    made = IMPLEMENTATIONS[name](folder, layout)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(params=IMPLEMENTATIONS)
def place(request, tmp_path):
    with opened(request.param, tmp_path) as made:
        yield made


@pytest.fixture
def remote(tmp_path):
    with opened("unix socket", tmp_path) as made:
        yield made


def put(sink, count, version=0):
    """The sink's next rows; every value tells the row's number."""
    layout, first = sink.layout, sink.next_logical
    number = np.arange(first, first + count, dtype=np.float32)
    obs = np.repeat(number[:, None], layout.obs_dim, axis=1)
    frames = None
    if layout.frame_bytes:
        frame = np.repeat(number.astype(np.uint8)[:, None], layout.frame_bytes, axis=1)
        frames = FrameColumns(frame, number > 0, np.minimum(number, layout.depth))
    sink.write(obs, np.full((count, layout.action_dim), 0.5), number, number % 2, obs + 1,
               np.full(count, 1.0), version, frames)  # fmt: skip
    return number


def arrived(place, shard, count, sink=None):
    """The rows [n, W] of a shard once that many are there, oldest first."""
    def come():
        if sink is not None:
            sink.counts()
        return int(place.ring.committed[shard]) >= count

    poll(come, what=lambda: f"{count} rows, there are {place.ring.committed.tolist()}")
    spec = place.ring.spec
    last = int(place.ring.committed[shard])
    # What a writer announced before it was killed may be half overwritten.
    logical = np.arange(max(0, int(place.ring.reserved[shard]) - spec.rows_per_shard), last)
    return place.ring.rows[shard * spec.stride_rows + logical % spec.rows_per_shard].copy()


def batch(reader, draws=512, seed=0):
    layout = reader.ring.spec.layout
    rows = np.empty((draws, layout.width), np.float32)
    reader.sample(np.random.default_rng(seed), rows)
    assert reader.count_torn(rows) == 0
    return rows


def test_rows_of_each_writer_arrive_whole_in_order_and_once(place):
    sinks = [place.sink(shard) for shard in range(SHARDS)]
    for count in (1, 3, 7, 40, 1, 2):
        for sink in sinks:
            put(sink, count)
    for shard, sink in enumerate(sinks):
        rows = arrived(place, shard, 54, sink)
        assert rows[:, LAYOUT.reward].tolist() == list(range(54))
        assert (rows[:, LAYOUT.next_obs] == rows[:, LAYOUT.obs] + 1).all()
        assert (rows[:, LAYOUT.action] == 0.5).all()
        assert sink.next_logical == 54
    reader = ReplayReader(place.ring)
    assert (reader.inserted, reader.available) == (108, 108)
    assert set(batch(reader)[:, 0]) <= set(range(54))


def test_a_full_ring_forgets_its_oldest_rows_and_a_reader_that_comes_late_sees_the_newest(place):
    sink = place.sink()
    for _ in range(10):
        poll(lambda: (sink.counts(), sink.has_room)[1])
        put(sink, 100)
    rows = arrived(place, 0, 1000, sink)
    assert rows[:, 0].tolist() == list(range(1000 - ROWS, 1000))
    assert batch(ReplayReader(place.ring))[:, 0].min() >= 1000 - ROWS


def test_a_successor_goes_on_behind_the_last_row_that_counts(place):
    put(place.sink(), 5)
    arrived(place, 0, 5)
    later = place.sink()
    assert later.next_logical == 5
    put(later, 3)
    assert arrived(place, 0, 8, later)[:, 0].tolist() == list(range(8))


def test_the_counts_that_a_rate_limiter_needs_come_back(place):
    sink, other = place.sink(0), place.sink(1)
    assert sink.counts() == (0, -1, 0)
    put(sink, 4)
    put(other, 2)
    assert sink.counts().inserted >= 4, "a sampler's own rows count at once, wherever they are"
    poll(lambda: sink.counts() == (6, -1, 0))
    place.ring.begin_learning()
    place.ring.sampled += 256
    poll(lambda: sink.counts() == (6, 6, 256))


def test_the_policy_s_version_comes_along(place):
    sink = place.sink()
    put(sink, 32, version=7)
    arrived(place, 0, 32, sink)
    assert place.ring.stamps[0, :2, 1].tolist() == [7, 7]


def test_a_write_that_does_not_fit_is_an_error_and_nothing_arrives(place):
    sink, one = place.sink(), np.zeros(1)
    with pytest.raises(ValueError, match="num_steps is missing"):
        sink.write(np.zeros((1, 3)), np.zeros((1, 2)), one, one, np.zeros((1, 3)))
    with pytest.raises(ValueError, match="broadcast"):
        sink.write(np.zeros((1, 4)), np.zeros((1, 2)), one, one, np.zeros((1, 3)), one)
    put(sink, 2)
    assert arrived(place, 0, 2, sink)[:, 0].tolist() == [0, 1]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_frames_arrive_with_their_rows(name, tmp_path):
    with opened(name, tmp_path, IMAGES) as place:
        sink = place.sink()
        for count in (1, 30, 9):
            put(sink, count)
        arrived(place, 0, 40, sink)
        reader = ReplayReader(place.ring)
        rows = np.empty((200, IMAGES.width), np.float32)
        frames = np.empty((200, IMAGES.window, IMAGES.frame_bytes), np.uint8)
        reader.sample(np.random.default_rng(0), rows, frames)
        newest = rows[:, IMAGES.reward].astype(int)
        assert (frames[:, -1] == newest[:, None]).all()
        assert (frames[:, 0] == np.maximum(newest - 2, 0)[:, None]).all()


def test_writers_that_are_killed_leave_no_torn_row_and_invent_none(place):
    where, fds = place.address()
    where |= {"ring": place.ring.spec.to_json()}
    reader, done = ReplayReader(place.ring), 0
    for _ in range(3):
        child = subprocess.Popen([sys.executable, "-c", WRITER, json.dumps(where)], pass_fds=fds,
                                 env={**os.environ, "PYTHONPATH": str(REPO)})  # fmt: skip
        try:
            poll(lambda before=done: place.ring.total_committed() > before + 3 * ROWS)
            for seed in range(20):
                batch(reader, seed=seed)
        finally:
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
        done = poll(lambda: standing(place))
        rows = arrived(place, 0, done)
        assert (np.diff(rows[:, 0]) == 1).all(), "in order, nothing twice, nothing left out"
        assert rows[-1, 0] == done - 1
        batch(reader)


def standing(place):
    """Rows of the first shard once nothing of a dead writer is on its way any more."""
    before = int(place.ring.committed[0])
    time.sleep(0.05)
    return before if before == int(place.ring.committed[0]) else None


# What only a socket promises.


def test_a_sink_without_room_says_so_and_takes_nothing(remote):
    sink = remote.sink(buffer_bytes=1000)
    put(sink, 5)
    arrived(remote, 0, 5, sink)
    remote.stop()
    put(sink, 30)
    assert not sink.has_room
    with pytest.raises(TransportError, match="ask has_room first"):
        put(sink, 1)
    remote.start()
    assert arrived(remote, 0, 35, sink)[:, 0].tolist() == list(range(35))
    poll(lambda: (sink.counts(), sink.has_room)[1])


def test_rows_on_their_way_when_the_gateway_died_are_sent_again_and_none_twice(remote):
    sink = remote.sink()
    for _ in range(5):
        for _ in range(20):
            put(sink, 2)
        remote.stop()
        put(sink, 2)
        remote.start()
    assert arrived(remote, 0, 210, sink)[:, 0].tolist() == list(range(210))


def test_a_gateway_that_stays_away_is_an_error(remote):
    sink = remote.sink(give_up_s=0.1)
    put(sink, 2)
    remote.stop()

    def told():
        with contextlib.suppress(BlockingIOError):
            try:
                sink.counts()
            except TransportError as error:
                return str(error)
        return None

    assert f"no gateway for these rows at {remote.where}" in poll(told)
    remote.start()


def test_another_ring_behind_the_same_address_is_an_error(remote):
    sink = remote.sink()
    put(sink, 4)
    arrived(remote, 0, 4, sink)
    poll(lambda: (sink.counts(), sink._kept_bytes == 0)[1])
    remote.stop()
    remote.ring.close()
    remote.ring = ReplayRing.create(RingSpec(LAYOUT, SHARDS, ROWS))
    remote.start()

    def told():
        try:
            sink.counts()
        except TransportError as error:
            return str(error)
        return None

    assert "has 0 rows, after 4 were committed: it is another one now" in poll(told)


@pytest.mark.parametrize("what", ["secret", "layout", "shard"])
def test_who_is_not_of_the_run_is_hung_up_on_and_others_notice_nothing(remote, what):
    sink = remote.sink()
    wrong = {"secret": {"secret": bytes(32)}, "layout": {"layout": RowLayout(4, 2)}, "shard": {"shard": SHARDS}}[what]
    with pytest.raises(TransportError, match="no gateway for these rows"):
        remote.sink(**wrong)
    put(sink, 2)
    arrived(remote, 0, 2, sink)


def test_a_gateway_without_the_secret_is_not_given_any_row(remote, tmp_path):
    imposter = Gateway(f"unix:{tmp_path}/imposter", bytes(32), LAYOUT, lambda shard: ShardWriter(remote.ring, shard))
    ending = threading.Event()
    thread = threading.Thread(target=remote.serve, args=(imposter, ending))
    thread.start()
    try:
        with pytest.raises(TransportError, match="no gateway for these rows"):
            SocketSink(imposter.address, remote.secret, LAYOUT, 0)
    finally:
        ending.set()
        thread.join()


def test_noise_and_frames_that_are_too_large_cost_their_own_connection_only(remote):
    for noise in (b"", b"GET / HTTP/1.0\r\n\r\n", os.urandom(5000)):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(remote.where.partition(":")[2])
            with contextlib.suppress(OSError):  # it may have hung up on us already
                stranger.sendall(noise)
    sink = remote.sink()
    sink._unsent += (2**31).to_bytes(4, "little") + bytes(16)
    poll(lambda: (sink.counts(), sink._socket is None)[1], what="the gateway to hang up")
    put(sink, 3)
    assert arrived(remote, 0, 3, sink)[:, 0].tolist() == [0, 1, 2]


def test_only_this_user_can_read_the_secret_and_knock_at_the_socket(tmp_path):
    with opened("unix socket", tmp_path) as place:
        assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("secret", "gateway")] == [0o600, 0o600]
        assert read_secret(tmp_path / "secret") == place.secret
    with pytest.raises(FileExistsError):
        create_secret(tmp_path / "secret")
    with pytest.raises(TransportError, match="cannot be read"):
        read_secret(tmp_path / "none")


@pytest.mark.parametrize("address", ["tcp:0.0.0.0:5000", "tcp:example.org:80", "unix:", "gateway", "tcp:127.0.0.1:x"])
def test_an_address_that_is_not_on_this_machine_is_refused(address):
    with pytest.raises(TransportError, match="is not unix:PATH"):
        Gateway(address, bytes(32), LAYOUT, lambda shard: None)
