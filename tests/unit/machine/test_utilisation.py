"""Live figures: named as in the table of metrics, honest about rates, never held up by a driver."""

import dataclasses
import itertools
import os
import statistics
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from harness import poll
from test_hardware import FakeNvml

from spreeze.machine.hardware import GPU_ENERGY, GpuMonitor, core_facts
from spreeze.machine.utilisation import Utilisation, _core_numbers
from spreeze.metrics.table import by_name

_TICKS_S = 2 / os.sysconf("SC_CLK_TCK")
"""How far two readings of a process's time can be off: one tick each of user and system time."""


@pytest.fixture
def no_gpu():
    monitor = GpuMonitor(FakeNvml(), "")
    yield monitor
    monitor.close()


def _until(condition):
    return poll(condition, what="figures")


def _busy(seconds):
    """Takes so much processor time."""
    before_s = time.process_time()
    while time.process_time() < before_s + seconds:
        sum(range(1000))


def _times():
    """Wall time and processor time of this process, both in seconds."""
    return np.array([time.monotonic(), time.process_time()])


def test_first_sample_has_levels_but_no_rates(no_gpu):
    first = Utilisation({"self": os.getpid()}, gpu_monitor=no_gpu).sample()
    assert set(first) == {"memory_used_bytes", "process_memory_bytes/self"}
    assert first["process_memory_bytes/self"] > 1e6


def test_cores_have_their_own_numbers_where_some_are_offline(tmp_path):
    (tmp_path / "stat").write_text("cpu  9 9 9\ncpu0 1 1 1\ncpu2 1 1 1\ncpu6 1 1 1\nintr 5\n")
    assert _core_numbers(tmp_path) == [0, 2, 6]


def test_second_sample_has_rates_under_known_names(no_gpu, tmp_path):
    utilisation = Utilisation({"self": os.getpid()}, gpu_monitor=no_gpu)
    began = _times()
    utilisation.sample()
    between = _times()
    _busy(0.3)
    done = _times()
    values = utilisation.sample()
    ended = _times()
    for name, value in values.items():
        by_name(name)
        assert isinstance(value, float)
    cores = os.sched_getaffinity(0)
    assert {name for name in values if name.startswith("cpu_core_use/")} == {f"cpu_core_use/{i}" for i in cores}
    assert 0.0 <= values["cpu_use"] <= 1.0
    # It looked at both clocks at moments unknown, within the two samples; the kernel counts in hundredths.
    (inner_s, inner_cpu_s), (outer_s, outer_cpu_s) = done - between, ended - began
    assert (inner_cpu_s - _TICKS_S) / outer_s <= values["process_cpu_use/self"] <= (outer_cpu_s + _TICKS_S) / inner_s
    assert values["disk_write_bytes_per_s"] >= 0.0


def test_samples_too_close_for_a_rate_have_none(no_gpu):
    now = iter((0.0, 0.001, 1.0))
    utilisation = Utilisation({}, gpu_monitor=no_gpu, clock=lambda: next(now))
    utilisation.sample()
    _busy(0.05)
    assert "cpu_use" not in utilisation.sample()
    assert "cpu_use" in utilisation.sample()


def test_process_that_is_gone_is_dropped_and_another_under_its_name_starts_anew(no_gpu):
    code = "import sys; sys.stdin.read()"
    children = [subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) for _ in range(2)]
    clock = iter(range(100))
    utilisation = Utilisation({}, gpu_monitor=no_gpu, clock=lambda: float(next(clock)))
    utilisation.sample({"learner": children[0].pid})
    assert "process_cpu_use/learner" in utilisation.sample()
    children[0].communicate()
    assert not any("learner" in name for name in utilisation.sample())
    found = utilisation.sample({"learner": children[1].pid})
    assert "process_memory_bytes/learner" in found
    assert "process_cpu_use/learner" not in found
    children[1].communicate()


def test_gpu_figures_arrive_under_known_names_and_in_base_units():
    utilisation = Utilisation({}, gpu_monitor=GpuMonitor(FakeNvml(), "1,0"))
    values = _until(lambda: {k: v for k, v in utilisation.sample().items() if k.startswith("gpu")})
    utilisation.close()
    expected = {"gpu_use": 0.4, "gpu_memory_used_bytes": 2.0 * 2**30, "gpu_power_w": 120.0, "gpu_clock_hz": 1.5e9,
                "gpu_memory_bytes": 8.0 * 2**30, "gpu_clock_max_hz": 2e9}  # fmt: skip
    assert values == {f"{name}/{index}": value for name, value in expected.items() for index in (0, 1)}


def _package(root, name, energy_uj, wraps_at=1000):
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    for file, value in (("name", "package-0"), ("energy_uj", energy_uj), ("max_energy_range_uj", wraps_at - 1)):
        (folder / file).write_text(f"{value}\n")


def test_energy_is_summed_over_packages_and_gpus_from_the_first_sample_on_even_where_a_counter_wraps(tmp_path):
    _package(tmp_path, "intel-rapl:0", 900)
    _package(tmp_path, "intel-rapl:1", 0, wraps_at=10**9)
    _package(tmp_path, "intel-rapl:0:0", 5)
    (tmp_path / "intel-rapl:0:0" / "name").write_text("core\n")  # a part of package 0
    polled = [{"gpu_use/0": 0.1}, {f"{GPU_ENERGY}/0": 50.0}, {f"{GPU_ENERGY}/0": 52.5}, {f"{GPU_ENERGY}/0": 1.0}]
    gpus = SimpleNamespace(poll=lambda: polled.pop(0), close=lambda: None, trouble=None)
    utilisation = Utilisation({}, gpu_monitor=gpus, powercap=tmp_path)
    assert utilisation.sample()["energy_j"] == 0.0
    _package(tmp_path, "intel-rapl:0", 100)  # it wrapped: 200
    _package(tmp_path, "intel-rapl:1", 3 * 10**6, wraps_at=10**9)
    found = utilisation.sample()
    assert found["energy_j"] == pytest.approx(3.0002)
    assert not any(name.startswith(GPU_ENERGY) for name in found)
    assert utilisation.sample()["energy_j"] == pytest.approx(3.0002 + 2.5)
    assert utilisation.sample()["energy_j"] == pytest.approx(5.5002), "the driver was loaded again"


def test_where_no_counter_can_be_read_there_is_no_energy(tmp_path, no_gpu):
    _package(tmp_path, "intel-rapl:0", "not a number")
    assert "energy_j" not in Utilisation({}, gpu_monitor=no_gpu, powercap=tmp_path).sample()
    assert "energy_j" not in Utilisation({}, gpu_monitor=no_gpu, powercap=tmp_path / "none").sample()


def test_what_a_slice_does_not_tell_is_left_out():
    monitor = GpuMonitor(FakeNvml(), "MIG-cc")
    values = _until(monitor.poll)
    monitor.close()
    assert "gpu_use/0" not in values
    assert values["gpu_memory_used_bytes/0"] == 2.0 * 2**30


def test_hung_driver_never_holds_a_sample_up_and_its_old_figures_expire():
    release, entered = threading.Event(), threading.Event()

    class Hanging(FakeNvml):
        calls = 0

        def nvmlDeviceGetPowerUsage(self, handle):
            Hanging.calls += 1
            if Hanging.calls > 1:
                entered.set()
                release.wait()
            return 1000

    monitor = GpuMonitor(Hanging(), "0", timeout_s=0.05)
    utilisation = Utilisation({}, gpu_monitor=monitor)
    _until(lambda: utilisation.sample() and entered.is_set())
    _until(lambda: not any(name.startswith("gpu") for name in utilisation.sample()) and monitor.trouble)
    assert "has not answered" in utilisation.trouble
    utilisation.close = lambda: monitor.close(timeout_s=0.05)
    utilisation.close()
    release.set()


def _median_cpu_s(act):
    times = []
    for _ in range(50):
        start_s = time.thread_time()
        act()
        times.append(time.thread_time() - start_s)
    return statistics.median(times)


def test_a_sample_of_eight_processes_costs_about_what_asking_for_them_does(no_gpu):
    pids, process = {f"sampler-{i}": os.getpid() for i in range(8)}, psutil.Process()
    utilisation = Utilisation(pids, gpu_monitor=no_gpu)

    def ask():
        for _ in pids:
            process.cpu_times(), process.memory_info(), process.io_counters()

    assert _median_cpu_s(lambda: utilisation.sample(pids)) < 8 * _median_cpu_s(ask)


def test_of_a_quota_the_use_is_what_the_run_s_processes_take_of_it(no_gpu):
    clock = itertools.count()
    cores = dataclasses.replace(core_facts(), ids=(0, 1), quota=0.5, usable=0.5)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        utilisation = Utilisation({"busy": busy.pid}, gpu_monitor=no_gpu, clock=lambda: float(next(clock)), cores=cores)
        poll(lambda: utilisation.sample().get("cpu_use") == 1.0, what="more than half a core of half a core")
        busy.kill()
