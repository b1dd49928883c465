"""Cores, memory and GPUs as containers of all kinds show them, played by fake /proc and /sys trees."""

import dataclasses
import json
import threading
from types import SimpleNamespace

import pytest
from harness import PATIENCE_S

from spreeze.machine import hardware
from spreeze.machine.hardware import GpuMonitor, read_gpus

V2 = "0::/user.slice/run.scope\n"
V1 = "5:cpuset:/docker/abc\n4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/\n"


def _tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture(autouse=True)
def kernel(monkeypatch):
    """What the kernel answers by itself: the cores that this process may use, and memory."""
    told = SimpleNamespace(cores={0, 1, 2, 3}, memory=SimpleNamespace(total=8 * 2**30, available=4 * 2**30))
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda pid: told.cores)
    monkeypatch.setattr(hardware.psutil, "virtual_memory", lambda: told.memory)
    return told


def _base(cgroup=V2):
    files = {
        "proc/self/cgroup": cgroup,
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: Imaginary 9000\n",
        "proc/sys/kernel/osrelease": "7.0.0\n",
    }
    for core in range(4):
        files[f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"] = f"{core % 2},{core % 2 + 2}\n"
    return files


def test_where_none_can_be_pinned_all_cores_count_or_the_number_that_is_set(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "_PINS_CORES", False)
    monkeypatch.setattr(hardware.os, "cpu_count", lambda: 6)
    monkeypatch.setenv(hardware._CORES, "")
    assert hardware.core_facts(tmp_path).reason == "6 cores"
    hardware.use_cores([4, 5])
    assert hardware.core_facts(tmp_path).ids == (4, 5)


def test_without_any_limit_affinity_decides(tmp_path, kernel):
    kernel.cores = {0, 1, 2}
    facts = hardware.core_facts(_tree(tmp_path, _base()))
    assert (facts.usable, facts.reason) == (3.0, "3 cores by affinity")


@pytest.mark.parametrize(("text", "cores"), [("50000 100000", 0.5), ("150000 100000", 1.5), ("max 100000", 4.0)])
def test_quota_of_cgroup_v2(tmp_path, text, cores):
    files = _base() | {"sys/fs/cgroup/user.slice/run.scope/cpu.max": text + "\n"}
    facts = hardware.core_facts(_tree(tmp_path, files))
    assert facts.usable == cores
    assert ("quota" in facts.reason) == (cores < 4)


def test_quota_of_an_ancestor_counts(tmp_path):
    files = _base() | {
        "sys/fs/cgroup/user.slice/run.scope/cpu.max": "300000 100000",
        "sys/fs/cgroup/user.slice/cpu.max": "200000 100000",
    }
    assert hardware.core_facts(_tree(tmp_path, files)).quota == 2.0


def test_quota_of_cgroup_v1_at_a_containers_mount_point(tmp_path):
    folder = "sys/fs/cgroup/cpu,cpuacct"  # the path of /proc/self/cgroup does not exist inside a container
    files = _base(cgroup=V1) | {f"{folder}/cpu.cfs_quota_us": "50000\n", f"{folder}/cpu.cfs_period_us": "100000\n"}
    assert hardware.core_facts(_tree(tmp_path, files)).usable == 0.5


def test_cgroup_v1_without_quota_says_minus_one(tmp_path):
    folder = "sys/fs/cgroup/cpu"
    files = _base(cgroup=V1) | {f"{folder}/cpu.cfs_quota_us": "-1\n", f"{folder}/cpu.cfs_period_us": "100000\n"}
    assert hardware.core_facts(_tree(tmp_path, files)).quota is None


def test_cpuset_narrows_affinity(tmp_path):
    files = _base(cgroup=V1) | {"sys/fs/cgroup/cpuset/docker/abc/cpuset.cpus": "1,3\n"}
    facts = hardware.core_facts(_tree(tmp_path, files))
    assert (facts.ids, facts.usable, facts.reason) == ((1, 3), 2.0, "cpuset leaves 2 of 4 cores")


@pytest.mark.parametrize(("cores", "physical"), [({0, 1, 2, 3}, 2), ({0, 2}, 1), ({0, 9}, None)])
def test_smt_siblings_are_one_physical_core(tmp_path, kernel, cores, physical):
    kernel.cores = cores
    assert hardware.core_facts(_tree(tmp_path, _base())).physical == physical


def test_memory_without_limit(tmp_path):
    facts = hardware.memory_limits(_tree(tmp_path, _base()))
    assert (facts.total_bytes, facts.available_bytes, facts.usable_bytes) == (8 * 2**30, 4 * 2**30, 4 * 2**30)
    assert facts.cgroup_limit_bytes is None


def test_memory_limit_of_cgroup_v2_counts_page_cache_as_free(tmp_path):
    folder = "sys/fs/cgroup/user.slice/run.scope"
    files = _base() | {
        f"{folder}/memory.max": str(2**30),
        f"{folder}/memory.current": str(600 * 2**20),
        f"{folder}/memory.stat": f"anon 5\ninactive_file {100 * 2**20}\n",
    }
    facts = hardware.memory_limits(_tree(tmp_path, files))
    assert (facts.cgroup_limit_bytes, facts.usable_bytes) == (2**30, 2**30 - 500 * 2**20)


def test_memory_limit_of_cgroup_v1_and_its_no_limit(tmp_path):
    folder = "sys/fs/cgroup/memory"
    files = _base(cgroup=V1) | {
        f"{folder}/docker/abc/memory.limit_in_bytes": "9223372036854771712",
        f"{folder}/memory.limit_in_bytes": str(3 * 2**30),
        f"{folder}/memory.usage_in_bytes": str(2**30),
    }
    facts = hardware.memory_limits(_tree(tmp_path, files))
    assert (facts.cgroup_limit_bytes, facts.usable_bytes) == (3 * 2**30, 2 * 2**30)


def test_usable_memory_is_never_negative(tmp_path):
    folder = "sys/fs/cgroup/user.slice/run.scope"
    files = _base() | {f"{folder}/memory.max": "1000", f"{folder}/memory.current": "2000"}
    assert hardware.memory_limits(_tree(tmp_path, files)).usable_bytes == 0


@pytest.mark.parametrize(("plugged", "expected"), [(True, "mains"), (False, "battery"), (None, None)])
def test_power_source(monkeypatch, plugged, expected):
    monkeypatch.setattr(hardware.psutil, "sensors_battery", lambda: SimpleNamespace(power_plugged=plugged))
    assert hardware.read_machine().power_source == expected


def test_empty_tree_gives_a_machine_and_no_error(tmp_path):
    machine = hardware.read_machine(tmp_path)
    assert machine.cores.usable >= 1
    assert machine.cores.physical is None
    assert machine.memory.total_bytes > 0


@pytest.mark.parametrize("text", ["", "nonsense", "0-", "9999999999-0", "5-2", "\x00", "max", "1e400 1"])
def test_nonsense_in_every_file_is_ignored(tmp_path, text):
    files = dict.fromkeys(_base(), text)
    for name in ("cpu.max", "memory.max", "cpuset.cpus.effective", "memory.stat", "cpu.cfs_quota_us"):
        files[f"sys/fs/cgroup/{name}"] = text
    machine = hardware.read_machine(_tree(tmp_path, files))
    assert machine.cores.usable >= 1
    assert machine.cores.quota is None


def test_real_machine_is_json_and_one_line():
    machine = hardware.read_machine()
    assert json.loads(json.dumps(dataclasses.asdict(machine)))["cores"]["usable"] == machine.cores.usable
    assert "usable core" in machine.one_line()
    assert "\n" not in machine.one_line()


def test_identity_holds_over_free_memory_and_changes_with_the_quota(tmp_path, kernel):
    root = _tree(tmp_path, _base())
    first = hardware.read_machine(root).identity()
    kernel.memory.available //= 2
    assert hardware.read_machine(root).identity() == first
    _tree(root, {"sys/fs/cgroup/cpu.max": "50000 100000"})
    assert hardware.read_machine(root).identity() != first


class FakeNvml:
    """Two cards and one MIG slice; what is not supported raises, as in the real one."""

    NVML_CLOCK_SM = 1
    UUIDS = ("GPU-aaaa-1", "GPU-bbbb-2")

    def __init__(self, hang=None, lost=False):
        self.hang, self.lost, self.sessions = hang, lost, 0

    def nvmlInit(self):
        if self.hang is not None:
            self.hang.wait()
        self.sessions += 1

    def nvmlShutdown(self):
        self.sessions -= 1

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.UUIDS[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != "MIG-cc":
            raise RuntimeError("Not Found")
        return uuid

    def nvmlDeviceGetUUID(self, handle):
        return handle

    def nvmlDeviceGetName(self, handle):
        return "Imaginary GPU"

    def nvmlSystemGetDriverVersion(self):
        return "600.1"

    def nvmlDeviceGetMemoryInfo(self, handle):
        if self.lost:
            raise RuntimeError("GPU is lost")
        return SimpleNamespace(total=8 * 2**30, free=6 * 2**30, used=2 * 2**30)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        raise RuntimeError("Not Supported")

    def nvmlDeviceGetMaxClockInfo(self, handle, clock):
        return 2000

    def nvmlDeviceGetUtilizationRates(self, handle):
        if self.lost or handle.startswith("MIG"):
            raise RuntimeError("Not Supported")
        return SimpleNamespace(gpu=40)

    def nvmlDeviceGetPowerUsage(self, handle):
        if self.lost:
            raise RuntimeError("GPU is lost")
        return 120_000

    def nvmlDeviceGetClockInfo(self, handle, clock):
        if self.lost:
            raise RuntimeError("GPU is lost")
        return 1500


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        ("0,1", ["GPU-aaaa-1", "GPU-bbbb-2"]),
        ("1", ["GPU-bbbb-2"]),
        ("1,0", ["GPU-bbbb-2", "GPU-aaaa-1"]),
        ("GPU-bbbb", ["GPU-bbbb-2"]),
        ("MIG-cc", ["MIG-cc"]),
        ("GPU-", []),
        ("MIG-nobody", []),
        ("MIG-cc,MIG-cc", ["MIG-cc"]),
        (" 1 , 0 ", ["GPU-bbbb-2", "GPU-aaaa-1"]),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,-1,1", ["GPU-aaaa-1"]),
        ("", []),
        ("7", []),
        ("0,0", ["GPU-aaaa-1"]),
    ],
)
def test_visible_gpus_follow_cuda_visible_devices(visible, uuids):
    nvml = FakeNvml()
    report = read_gpus(nvml, visible)
    assert [gpu.uuid for gpu in report.gpus] == uuids
    assert nvml.sessions == 0
    assert [gpu.index for gpu in report.gpus] == list(range(len(uuids)))
    assert ("hides all 2 GPUs" in report.reason) == (not uuids)


def test_a_slice_is_named_as_one_and_unknown_is_none():
    (card,), (part,) = (read_gpus(FakeNvml(), visible).gpus for visible in ("0", "MIG-cc"))
    assert (card.is_mig, card.memory_bytes, card.clock_max_hz) == (False, 8 * 2**30, 2e9)
    assert (part.is_mig, part.uuid) == (True, "MIG-cc")
    assert card.power_limit_w is None
    assert (card.use, card.power_w, card.clock_hz) == (0.4, 120.0, 1.5e9)
    assert part.use is None


def test_the_environment_s_own_cuda_visible_devices_counts(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bbbb-2")
    assert [gpu.uuid for gpu in read_gpus(FakeNvml()).gpus] == ["GPU-bbbb-2"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert len(read_gpus(FakeNvml()).gpus) == 2


def test_no_driver_is_no_gpu_with_a_reason():
    class Broken(FakeNvml):
        def nvmlInit(self):
            raise RuntimeError("Driver Not Loaded")

    assert read_gpus(Broken(), "0") == ((), "no NVIDIA driver: Driver Not Loaded")


def test_hung_driver_does_not_hang_the_caller():
    release = threading.Event()
    report = read_gpus(FakeNvml(hang=release), "0", timeout_s=0.1)
    release.set()
    assert report == ((), "the NVIDIA driver did not answer within 0.1 s")


def test_a_monitor_that_is_closed_during_a_reading_shuts_the_driver_down():
    reading, release = threading.Event(), threading.Event()

    class Slow(FakeNvml):
        def nvmlDeviceGetMemoryInfo(self, handle):
            reading.set()
            assert release.wait(PATIENCE_S)
            return super().nvmlDeviceGetMemoryInfo(handle)

    driver = Slow()
    monitor = GpuMonitor(driver, "0")
    monitor.poll()
    assert reading.wait(PATIENCE_S)
    monitor.close(timeout_s=0.01)
    release.set()
    monitor._thread.join(PATIENCE_S)
    assert (monitor._thread.is_alive(), driver.sessions) == (False, 0)


def test_unknown_figures_of_a_lost_gpu_are_left_out_and_named():
    monitor = GpuMonitor(FakeNvml(lost=True), "0")
    while monitor.trouble is None:
        assert monitor.poll() == {}
    monitor.close()
    assert monitor.trouble == "GPU 0 does not respond (lost?)"
