"""The doctor: every finding has a status and, where something is missing, a remedy; looking changes nothing."""

import dataclasses
import fcntl
import json
import os
import subprocess
import sys

import pytest

from spreeze.cli import doctor
from spreeze.config.algorithm_bases import ReplayConfig
from spreeze.errors import EnvError
from spreeze.machine.hardware import GpuFacts, read_machine

MACHINE = read_machine()


def _with(**fields):
    return dataclasses.replace(MACHINE, **fields)


@pytest.mark.parametrize(("version", "hint"), [((3, 11, 0), False), ((3, 13, 1), True)])
def test_newer_pythons_are_fine_and_it_is_said_what_they_lack(version, hint):
    found = doctor.check_python(version)
    assert (found.status, "need Python 3.11" in (found.remedy or "")) == ("ok", hint)


def test_half_a_core_is_a_warning_with_its_reason():
    cores = dataclasses.replace(MACHINE.cores, usable=0.5, quota=0.5, reason="cgroup quota of 0.5 cores")
    found = doctor.check_cores(_with(cores=cores))
    assert found.status == "warn"
    assert "0.5 usable" in found.text
    assert "cgroup quota" in found.text


def test_too_little_memory_fails_and_names_both_figures():
    memory = dataclasses.replace(MACHINE.memory, usable_bytes=2**30, cgroup_limit_bytes=2 * 2**30)
    found = doctor.check_memory(_with(memory=memory), ReplayConfig(capacity=100_000_000))
    assert found.status == "fail"
    assert "1.0 GiB free" in found.text
    assert "about 20.3 GiB" in found.text
    assert "--replay-capacity" in found.remedy


def test_default_replay_is_208_million_bytes():
    assert doctor._DEFAULT_LAYOUT.row_bytes * ReplayConfig().capacity == 208_000_000


def test_no_gpu_is_no_warning_and_has_its_reason():
    found = doctor.check_gpus(_with(gpus=(), gpu_reason="no NVIDIA GPU"))
    assert (found.status, found.text) == ("ok", "no NVIDIA GPU")


def _cards(**fields):
    known = {"index": 0, "uuid": "GPU-1", "name": "Imaginary GPU", "memory_bytes": 80 * 2**30, "power_limit_w": 700.0,
             "memory_free_bytes": 79 * 2**30, "clock_max_hz": 1.98e9, "driver": "600.1", "is_mig": False, "use": 0.0,
             "power_w": 68.0, "clock_hz": 0.36e9}  # fmt: skip
    return _with(gpus=(GpuFacts(**known | fields),))


def test_a_gpu_is_shown_with_what_it_does_now():
    found = doctor.check_gpus(_cards())
    assert found.status == "ok"
    assert found.text == (
        "Imaginary GPU: kernels run 0 % of the time, 68 of 700 W, 0.36 of 1.98 GHz, 1.0 GiB of 80.0 "
        "GiB in use; driver 600.1"
    )
    fields = ("use", "power_w", "power_limit_w", "clock_hz", "memory_free_bytes")
    unknown = doctor.check_gpus(_cards(**dict.fromkeys(fields)))
    assert unknown.status == "ok"
    assert "kernels run - of the time, - W, - of 1.98 GHz, - of 80.0 GiB in use" in unknown.text


@pytest.mark.parametrize("fields", [{"use": 0.6}, {"memory_free_bytes": 20 * 2**30}])
def test_a_gpu_that_others_use_is_a_warning(fields):
    found = doctor.check_gpus(_cards(**fields))
    assert (found.status, "other programs use GPU 0" in found.remedy) == ("warn", True)


def test_a_gpu_without_a_build_that_uses_it_is_a_warning(monkeypatch):
    monkeypatch.setattr(doctor, "_TORCH", "print('[\"2.13.0\", null, false]')")
    assert doctor.check_torch(has_gpu=False).status == "ok"
    found = doctor.check_torch(has_gpu=True)
    assert (found.status, "a build with CUDA" in found.remedy) == ("warn", True)


def test_a_build_for_gpus_that_sees_none_is_a_warning_only_where_there_is_one(monkeypatch):
    monkeypatch.setattr(doctor, "_TORCH", 'print(\'["2.13.0", "13.0", 0]\')')
    assert doctor.check_torch(has_gpu=False).status == "ok"
    found = doctor.check_torch(has_gpu=True)
    assert (found.status, found.remedy) == ("warn", "update the NVIDIA driver")


def test_battery_is_a_warning():
    assert doctor.check_power(_with(power_source="battery")).status == "warn"
    assert doctor.check_power(_with(power_source=None)).status == "ok"


def test_no_display_is_no_warning(monkeypatch):
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.delenv("DISPLAY", raising=False)
    assert (doctor.check_display().status, doctor.check_display().text) == ("ok", "none")
    monkeypatch.setenv("DISPLAY", ":0")
    assert (doctor.check_display().status, doctor.check_display().text) == ("ok", ":0")


def test_runs_dir_need_not_exist_and_is_not_made_by_looking(tmp_path):
    runs = tmp_path / "a" / "runs"
    assert doctor.check_disk(runs).status == "ok"
    assert doctor.check_sqlite(runs).status == "ok"
    assert doctor.check_live_runs(runs).status == "ok"
    assert list(tmp_path.iterdir()) == []


def test_runs_dir_that_cannot_be_written_fails(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "NamedTemporaryFile", refuse)
    monkeypatch.setattr(doctor.tempfile, "TemporaryDirectory", refuse)
    assert doctor.check_disk(tmp_path).status == "fail"
    assert doctor.check_sqlite(tmp_path).status == "fail"


@pytest.mark.parametrize(("busy", "status"), [(0.1, "ok"), (0.9, "warn")])
def test_cores_that_other_programs_keep_busy_are_reported(monkeypatch, busy, status):
    machine, clock = read_machine(), iter((10.0, 11.0))
    counted = iter((0.0, busy * machine.cores.usable))
    monkeypatch.setattr(doctor, "busy_s", lambda ids: next(counted))
    monkeypatch.setattr(doctor.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(doctor.time, "sleep", lambda seconds: None)
    found = doctor.check_load(machine)
    assert (found.status, found.text.partition(" ")[0]) == (status, f"{busy * machine.cores.usable:.1f}")


def test_run_that_is_alive_is_named(tmp_path):
    run = tmp_path / "walker"
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"state": "running"}))
    fd = os.open(run / "run.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    found = doctor.check_live_runs(tmp_path)
    os.close(fd)
    assert (found.status, found.text) == ("warn", "1 running: walker")
    assert doctor.check_live_runs(tmp_path).status == "ok"


def test_torch_that_cannot_be_imported_fails_with_a_remedy(monkeypatch):
    monkeypatch.setattr(doctor, "_TORCH", "raise ImportError('libtorch is broken')")
    found = doctor.check_torch()
    assert found.status == "fail"
    assert "libtorch is broken" in found.text
    assert "pip install" in found.remedy


def test_library_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(doctor, "_TORCH", "import sys; sys.stdin.read(); import time; time.sleep(10_000)")
    monkeypatch.setattr(doctor, "CHILD_TIMEOUT_S", 0.3)
    assert doctor.check_torch().status == "warn"


def test_missing_encoder_is_only_a_warning(monkeypatch):
    monkeypatch.setattr(doctor, "_ENCODER", "import no_such_encoder")
    assert doctor.check_encoder().status == "warn"


@pytest.mark.warm
def test_without_bullet_and_mujoco_the_default_task_is_a_warning_that_names_a_package(monkeypatch):
    monkeypatch.setattr("spreeze.envs.make.importlib.util.find_spec", lambda name: None)
    found = doctor.check_default_task()
    assert (found.status, "Pendulum-v1" in found.text, "mujoco" in found.remedy) == ("warn", True, True)


def test_a_default_task_that_fails_names_the_package_that_it_needs(monkeypatch):
    monkeypatch.setattr("spreeze.envs.make.importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(doctor, "probe_env", _refuse)
    found = doctor.check_default_task()
    assert (found.status, found.remedy) == ("fail", "pip install --force-reinstall gymnasium")


def _refuse(*arguments, **options):
    raise EnvError("Pendulum-v1 failed in the probe")


@pytest.mark.warm
def test_unknown_environment_fails_with_one_line():
    (found,), probe = doctor.check_env("Walker3DBulletEnv-v0", None)
    assert (found.status, probe) == ("fail", None)
    assert "Walker3DBulletEnv-v0" in found.text
    assert "\n" not in found.text


@pytest.mark.warm
def test_json_is_one_document_and_says_all(tmp_path, capsys):
    code = doctor.main(["--json", "--env", "Pendulum-v1", "--runs-dir", str(tmp_path)])
    document = json.loads(capsys.readouterr().out)
    assert (code, document["ok"]) == (0, True)
    assert len(document["checks"]) >= 12
    assert all(check["remedy"] for check in document["checks"] if check["status"] != "ok")
    assert document["env"]["spec"]["obs_dim"] == 3
    assert document["machine"]["one_line"]
    assert list(tmp_path.iterdir()) == []


def test_table_shows_findings_and_exit_code_says_not_ready(monkeypatch, capsys):
    failing = {"name": "PyTorch", "status": "fail", "text": "broken [red]", "remedy": "pip install torch"}
    monkeypatch.setattr(doctor, "examine", lambda *arguments: {"ok": False, "checks": [failing]})
    assert doctor.main([]) == 1
    shown = capsys.readouterr().out
    assert "broken [red]" in shown
    assert "-> pip install torch" in shown
    assert "Not ready" in shown


def test_what_is_ready_is_the_command_for_the_task_that_was_checked(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda *arguments: {"ok": True, "checks": []})
    assert doctor.main(["--env", "Own-v0", "--import", "own", "--env-arg", "name=a b"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "python -m spreeze.train --auto --env Own-v0 --import own --env-arg 'name=a b'" in shown


def test_none_of_these_modules_loads_torch_or_gymnasium():
    modules = "machine.hardware machine.utilisation metrics.store metrics.snapshot cli.doctor"
    imports = "\n".join(f"import spreeze.{name}" for name in modules.split())
    code = f"import sys\n{imports}\nassert not {{'torch', 'gymnasium'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def _host(**fields):
    return {"name": "beta", "address": "10.0.0.2", "cores": 16.0, "memory_free_bytes": 2**34, "python": "3.11.7",
            "versions": doctor.versions(), "env": {"step_us": 30.0}, "env_error": None, "round_trip_s": 0.001,
            "clock_difference_s": 0.0002, "bandwidth_bytes_per_s": 1e8, **fields}  # fmt: skip


@pytest.mark.parametrize(("host", "named", "status", "remedy"), [
    (_host(), "host 0 environment", "ok", None),
    ({"name": "beta", "address": "10.0.0.2", "failure": "ActorDiedError: no module spreeze"}, "host 0", "fail",
     "install the same version of Spreeze there"),
    (_host(versions=doctor.versions() | {"spreeze": "0.0.1"}), "host 0 versions", "fail", "same versions"),
    (_host(versions=doctor.versions() | {"gymnasium": "1.1"}), "host 0 versions", "warn", "same versions"),
    (_host(env=None, env_error="no module my_robot"), "host 0 environment", "fail", "on that host, too"),
    (_host(clock_difference_s=-7.0), "host 0 network", "warn", "NTP"),
    (_host(round_trip_s=0.5), "host 0 network", "warn", "delays"),
    (_host(bandwidth_bytes_per_s=1e6), "host 0 network", "warn", "slow network"),
])  # fmt: skip
def test_each_host_of_a_cluster_is_told_with_what_it_lacks(monkeypatch, host, named, status, remedy):
    asked = []

    def survey(address, task):
        asked.append((address, task["env_id"]))
        return {"hosts": [host], "ray": "2.60.0", "authenticated": True}

    monkeypatch.setattr(doctor, "survey", survey)
    checks, found = doctor.check_cluster("head:6379", "Pendulum-v1", None, ())
    assert asked == [(("head:6379", 0), "Pendulum-v1")]
    check = next(check for check in checks if check.name == named)
    assert check.status == status
    assert remedy is None or remedy in check.remedy
    assert found["hosts"] == [host]


def test_a_cluster_without_a_token_or_that_cannot_be_joined_is_told(monkeypatch):
    monkeypatch.setattr(doctor, "survey", lambda address, task: {"hosts": [], "ray": "2.60.0", "authenticated": False})
    checks, _ = doctor.check_cluster("auto", None, None, ())
    assert [(check.name, check.status) for check in checks] == [("cluster", "warn"), ("cluster token", "warn")]
    assert "RAY_AUTH_MODE=token" in checks[1].remedy
    (check,), _ = doctor.check_cluster("nonsense", None, None, ())
    assert (check.status, "expected HOST:PORT" in check.text) == ("fail", True)
