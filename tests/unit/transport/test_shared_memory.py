"""Nameless shared memory."""

import contextlib
import fcntl
import mmap
import os
import subprocess
import sys

import pytest
from harness import PATIENCE_S

from spreeze.cli import planning
from spreeze.config.layers import Layer, resolve
from spreeze.errors import ResourceError, TransportError
from spreeze.machine.hardware import memory_limits, read_machine
from spreeze.runtime.plan import RunPlan
from spreeze.transport import shared_memory
from spreeze.transport.shared_memory import ArraySpec, SharedArrays, Wakeup
from spreeze.types import Box, EnvSpec

FIELDS = (ArraySpec("one", (3,), "int64"), ArraySpec("two", (2, 5), "float32"))


def created(count=1):
    return SharedArrays.create("spreeze-test", (ArraySpec("bytes", (count,), "uint8"),))


def test_arrays_are_zeroed_and_start_on_lines_in_whole_pages():
    arrays = SharedArrays.create("spreeze-test", FIELDS)
    assert os.fstat(arrays.fd).st_size == SharedArrays.size_bytes(FIELDS) == mmap.PAGESIZE
    for name, shape, dtype in FIELDS:
        assert (arrays[name].shape, arrays[name].dtype) == (shape, dtype)
        assert not arrays[name].any()
        assert arrays[name].ctypes.data % 128 == 0
    arrays.close()
    arrays.close()


@pytest.mark.skipif(sys.platform != "linux", reason="seals are a Linux facility")
def test_memory_can_neither_shrink_nor_grow():
    arrays = created()
    seals = fcntl.fcntl(arrays.fd, fcntl.F_GET_SEALS)
    assert seals & fcntl.F_SEAL_SHRINK
    assert seals & fcntl.F_SEAL_GROW
    with pytest.raises(PermissionError):
        os.ftruncate(arrays.fd, 0)
    arrays.close()


def test_more_than_there_is_is_refused_with_needed_and_available(monkeypatch):
    monkeypatch.setattr(shared_memory, "available_bytes", lambda: 1_000_000)
    with pytest.raises(ResourceError, match=r"needs 2002944 bytes .* 1000000 are available"):
        created(2_000_000)


def test_a_whole_machine_and_more_is_refused():
    with pytest.raises(ResourceError, match="spreeze-test needs"):
        created(2**50)


def test_control_group_limit_counts_if_it_is_tighter(monkeypatch, tmp_path):
    files = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "1000000",
             "sys/fs/cgroup/memory.current": "400000", "sys/fs/cgroup/memory.stat": "inactive_file 1000"}  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(shared_memory, "memory_limits", lambda: memory_limits(tmp_path))
    with pytest.raises(ResourceError, match=r"needs 700416 bytes .* 601000 are available"):
        created(700_000)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert shared_memory.available_bytes() > 601_000


def test_close_tolerates_arrays_that_are_still_held():
    arrays = created()
    values, fd = arrays["bytes"], arrays.fd
    arrays.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert values[0] == 0


def test_attach_refuses_other_arrays_and_what_is_closed():
    arrays = SharedArrays.create("spreeze-test", FIELDS)
    others = (*FIELDS[:1], ArraySpec("two", (5, 2), "float32")), FIELDS[:1]
    for fields, meaning in ((others[0], ""), (others[1], ""), (FIELDS, "rows")):
        with pytest.raises(TransportError, match="other arrays than one"):
            SharedArrays.attach(os.dup(arrays.fd), fields, meaning)
    arrays.close()
    with pytest.raises(TransportError, match="cannot be attached"):
        SharedArrays.attach(10_000, FIELDS)


def test_child_sees_the_same_memory_through_the_inherited_descriptor():
    arrays = SharedArrays.create("spreeze-test", FIELDS)
    code = (
        "from spreeze.transport.shared_memory import ArraySpec, SharedArrays; "
        f"arrays = SharedArrays.attach({arrays.fd}, {FIELDS}); arrays['one'][2] = 42; arrays.close()"
    )
    subprocess.run([sys.executable, "-c", code], pass_fds=[arrays.fd], check=True, timeout=PATIENCE_S)
    assert arrays["one"].tolist() == [0, 0, 42]
    arrays.close()


def test_memory_and_wakeups_without_calls_of_linux_work_alike(monkeypatch):
    for name in ("memfd_create", "eventfd", "pread", "pwrite"):  # the last two fail on memory of macOS
        monkeypatch.delattr(os, name)
    arrays = SharedArrays.create("spreeze-test", FIELDS)
    arrays["two"][0, 0] = 1
    other = SharedArrays.attach(os.dup(arrays.fd), FIELDS)
    assert other["two"][0, 0] == 1
    with pytest.raises(TransportError, match="other arrays"):
        SharedArrays.attach(os.dup(arrays.fd), FIELDS[:1])
    other.close()
    arrays.close()
    wakeup = Wakeup.create()
    assert not wakeup.wait(0.0)
    for _ in range(100_000):  # more than a pipe holds
        wakeup.notify()
    assert wakeup.wait(0.0)
    wakeup.close()


def test_the_tuner_may_choose_a_replay_for_which_there_is_room_unless_its_size_is_asked_for(monkeypatch):
    def check(*facts):
        raise ResourceError("no room")

    monkeypatch.setattr(planning, "check_room", check)
    spec = EnvSpec(
        env_id="T-v0",
        import_module=None,
        obs_dim=3,
        action=Box((-1.0,), (1.0,)),
        max_episode_steps=None,
        reward_threshold=None,
    )
    asked = {"replay": {"capacity": 500_000}}
    for values, to_tune, refused in (({}, True, False), ({}, False, True), (asked, True, True)):
        plan = RunPlan(
            settings=resolve([Layer("user", values)]), spec=spec, samplers=1, free_core=True, to_tune=to_tune
        )
        with pytest.raises(ResourceError) if refused else contextlib.nullcontext():
            planning.check_machine(plan, read_machine())
