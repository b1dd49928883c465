"""Nameless shared memory."""

import contextlib
import fcntl
import mmap
import os
import subprocess
import sys

import numpy as np
import pytest
from harness import PATIENCE_S

from spreeze.cli import planning
from spreeze.config.layers import Layer, resolve
from spreeze.errors import ResourceError, TransportError
from spreeze.machine.hardware import memory_limits, read_machine
from spreeze.runtime.plan import RunPlan
from spreeze.transport import shared_memory
from spreeze.transport.shared_memory import allocate, attach
from spreeze.types import Box, EnvSpec


def test_block_is_zeroed_page_aligned_and_whole_pages():
    block = allocate("spreeze-test", 5000)
    assert block.size_bytes == 2 * mmap.PAGESIZE
    values = np.frombuffer(block.view, dtype=np.uint8)
    assert not values.any()
    assert values.ctypes.data % mmap.PAGESIZE == 0
    del values
    block.close()
    block.close()


@pytest.mark.skipif(sys.platform != "linux", reason="seals are a Linux facility")
def test_block_can_neither_shrink_nor_grow():
    block = allocate("spreeze-test", 4096)
    seals = fcntl.fcntl(block.fd, fcntl.F_GET_SEALS)
    assert seals & fcntl.F_SEAL_SHRINK
    assert seals & fcntl.F_SEAL_GROW
    with pytest.raises(PermissionError):
        os.ftruncate(block.fd, 0)
    block.close()


def test_more_than_there_is_is_refused_with_needed_and_available(monkeypatch):
    monkeypatch.setattr(shared_memory, "available_bytes", lambda: 1_000_000)
    with pytest.raises(ResourceError, match=r"needs 2002944 bytes .* 1000000 are available"):
        allocate("replay", 2_000_000)


def test_a_whole_machine_and_more_is_refused():
    with pytest.raises(ResourceError, match="replay needs"):
        allocate("replay", 2**50)


def test_control_group_limit_counts_if_it_is_tighter(monkeypatch, tmp_path):
    files = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "1000000",
             "sys/fs/cgroup/memory.current": "400000", "sys/fs/cgroup/memory.stat": "inactive_file 1000"}  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(shared_memory, "memory_limits", lambda: memory_limits(tmp_path))
    with pytest.raises(ResourceError, match=r"needs 700416 bytes .* 601000 are available"):
        allocate("replay", 700_000)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert shared_memory.available_bytes() > 601_000


def test_close_tolerates_arrays_that_still_look_inside():
    block = allocate("spreeze-test", 4096)
    values = np.frombuffer(block.view, dtype=np.int64)
    fd = block.fd
    block.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert values[0] == 0


def test_attach_refuses_what_is_too_small_or_closed():
    block = allocate("spreeze-test", 4096)
    with pytest.raises(TransportError, match="4096 bytes of shared memory, 8192 are needed"):
        attach(block.fd, 8192)
    block.close()
    with pytest.raises(TransportError, match="cannot be attached"):
        attach(10_000, 4096)


def test_child_sees_the_same_memory_through_the_inherited_descriptor():
    block = allocate("spreeze-test", 4096)
    code = (
        f"from spreeze.transport.shared_memory import attach; b = attach({block.fd}, 4096); b.view[7] = 42; b.close()"
    )
    subprocess.run([sys.executable, "-c", code], pass_fds=[block.fd], check=True, timeout=PATIENCE_S)
    assert block.view[7] == 42
    block.close()


def test_fallback_without_memfd_works_alike(monkeypatch):
    monkeypatch.setattr(shared_memory.sys, "platform", "darwin")
    block = allocate("spreeze-test", 4096)
    block.view[0] = 1
    other = attach(os.dup(block.fd), 4096)
    assert other.view[0] == 1
    other.close()
    block.close()


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
