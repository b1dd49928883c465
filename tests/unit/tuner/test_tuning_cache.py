"""What the tuner remembers: reused on the same machine for the same question, measured anew otherwise."""

import contextlib
import dataclasses
import fcntl
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile

import psutil
import pytest
from harness import poll

from spreeze.config.layers import Layer, resolve
from spreeze.envs.probe import Probe
from spreeze.errors import ConfigError, SpreezeError
from spreeze.machine import hardware
from spreeze.machine.hardware import read_machine
from spreeze.runtime.interrupts import Interrupts
from spreeze.tuner import run
from spreeze.tuner.problem import BATCH, JOINT, LEARNER, RATIO, RATIO_MAX, SAMPLERS, SCHEMA, TrialResult
from spreeze.types import Box, Choices, EnvSpec

SPEC = EnvSpec(
    env_id="Pendulum-v1", import_module=None, obs_dim=3, action=Box((-2.0,), (2.0,)),
    max_episode_steps=200, reward_threshold=None,
)  # fmt: skip
PROBE = Probe(spec=SPEC, step_us_median=50.0, step_cv=0.1, memory_bytes=10**6)
_HERE = read_machine()
MACHINE = dataclasses.replace(
    _HERE, power_source="mains", cores=dataclasses.replace(_HERE.cores, usable=float(len(_HERE.cores.ids)), quota=None)
)
"""Without a quota: of one it is not known what others take."""


class FakeMeasuring:
    """Stands in for the measurements on this machine: t(B) = 1 ms + 10 us B, samplers of 1000 env steps/s."""

    def __init__(self, plan, **facts):
        self.facts = facts

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def seconds_left(self):
        return 50.0

    def learner(self, settings, *, within_s, on_result):
        rates = [TrialResult(trial=LEARNER, setting=one, updates_per_s=(1 / (1e-3 + 1e-5 * one[BATCH]),) * 3)
                 for one in settings]  # fmt: skip
        for rate in rates:
            on_result(rate)
        return rates

    def joint(self, settings, *, within_s, on_result):
        rates = [
            TrialResult(trial=JOINT, setting=one, env_steps_per_s=(1000.0 * one[SAMPLERS],) * 3,
                        updates_per_s=(1 / (1e-3 + 1e-5 * one[BATCH]),) * 3, cpu_share=(0.5,) * 3)
            for one in settings
        ]  # fmt: skip
        for rate in rates:
            on_result(rate)
        return rates


class Bench:
    """Runs the tuner over the stand-in; says how often it was asked to measure."""

    def __init__(self, monkeypatch, folder):
        self.measured, self.said, self.rows, self.fail, self.machine = 0, [], [], False, MACHINE
        self.starve = False
        self.before = []
        self.cache, self.others = folder / "spreeze", 0.0
        monkeypatch.setattr(run.ExternalLoad, "cores", lambda load: self.others)  # whatever else this machine does
        monkeypatch.setattr(run, "_LOAD_CHECK_S", 0.0)
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        monkeypatch.setattr(run, "Measurer", self._measuring)

    def _measuring(self, plan, **facts):
        self.measured += 1
        fake = FakeMeasuring(plan, **facts)
        if self.starve:
            fake.learner = lambda settings, *, within_s, on_result: [
                TrialResult(trial=LEARNER, setting=one, starved=True,
                            failure="the learner took no update within 23 s; no worker reported an error")
                for one in settings
            ]  # fmt: skip
        if self.fail:
            fake.learner = lambda settings, *, within_s, on_result: [
                TrialResult(trial=LEARNER, setting=one, failure="it crashed") for one in settings
            ]
            fake.joint = lambda settings, *, within_s, on_result: [
                TrialResult(trial=JOINT, setting=one, failure="it crashed") for one in settings
            ]
        return fake

    def tune(self, user=None, *, fresh=False, probe=PROBE):
        settings = resolve([Layer("user", {"env": {"id": "Pendulum-v1"}, **(user or {})})])
        listener = run.TunerCallbacks(
            say=self.said.append, on_result=self.rows.append, before=lambda: self.before.append(len(self.rows))
        )
        tuning = run.Tuning(settings, probe, self.machine, Interrupts(), listener)
        record = (None if fresh else tuning.known()) or tuning.measured(spent_s=0.0, fresh=fresh)
        return run.layer_of(record), record

    def records(self):
        return sorted(self.cache.glob("tune-*.json"))


@pytest.fixture
def bench(monkeypatch, tmp_path):
    return Bench(monkeypatch, tmp_path)


def test_a_result_is_a_layer_of_settings_with_its_record(bench):
    layer, record = bench.tune()
    assert layer.source == "tuner"
    settings = resolve([layer])
    assert settings.config.learner.batch_size == record["choice"]["learner.batch_size"]
    assert settings.config.sampling.samplers == record["choice"]["sampling.samplers"]
    assert record["env"] == "Pendulum-v1"
    assert record["machine"]
    assert record["versions"]["torch"]


def test_the_same_question_is_measured_once(bench):
    layer, record = bench.tune()
    asked = bench.measured
    again, remembered = bench.tune()
    assert again == layer
    assert remembered == json.loads(json.dumps(record)) | {"reused": True}
    assert bench.measured == asked
    assert any("tuned before on this machine" in text and "--fresh" in text for text in bench.said)


def test_room_is_made_before_the_first_measurement_and_not_for_a_known_answer(bench):
    bench.tune()
    assert bench.before == [0]
    bench.tune()
    assert bench.before == [0]


def test_fresh_measures_again(bench):
    bench.tune()
    asked = bench.measured
    bench.tune(fresh=True)
    assert bench.measured == 2 * asked
    assert len(bench.records()) == 1


@pytest.mark.parametrize(
    "user",
    [{"run": {"algo": "td3"}}, {"sac": {"hidden_sizes": [64]}}, {"sac": {"n_step": 3}}, {"learner": {"batch_size": 64}},
     {"sampling": {"samplers": 1}}, {"learner": {"device": "cpu"}}, {"tuning": {"objective": "sampling"}},
     {"tuning": {"leave_free": 0.25}}, {"replay": {"samples_per_insert_min": 16.0}}],
    ids=str,
)  # fmt: skip
def test_another_question_has_an_answer_of_its_own(bench, user):
    bench.tune()
    bench.tune(user)
    assert len(bench.records()) == 2


@pytest.mark.parametrize("learner", [{"threads": 2}, {"device": "cuda:0"}], ids=str)
def test_a_learner_that_no_knob_chooses_is_part_of_the_question(learner):
    layers = [Layer("user", {"run": {"algo": "ppo", "mode": "hts"}})]
    plain = run._cached_by(resolve(layers), PROBE, MACHINE, samplers_only=False)
    assert plain == run._cached_by(resolve(layers), PROBE, MACHINE, samplers_only=False)
    assert plain != run._cached_by(
        resolve([*layers, Layer("user", {"learner": learner})]), PROBE, MACHINE, samplers_only=False
    )


def test_the_answer_for_an_imported_algorithm_is_found_again(bench, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "imported_for_a_test.py").write_text(
        "from spreeze.algorithms.a2c import A2C, A2CConfig\nfrom spreeze.config.algorithms import AlgorithmRow\n"
        "ALGORITHMS = (AlgorithmRow(name='a2c_of_a_test', config=A2CConfig, on_policy=A2C),)\n"
    )
    asked = {"run": {"algo": "a2c_of_a_test", "mode": "hts"}, "env": {"import_module": "imported_for_a_test"}}
    settings = resolve([Layer("user", asked)], "imported_for_a_test")
    path = tmp_path / "tune.json"
    choice = {"a2c_of_a_test.gae_lambda": 0.5}
    record = {"schema": SCHEMA, "key": "k", "choice": choice, "reasons": choice, "settings": choice}
    path.write_text(json.dumps(record | {"checksum": run.cache_key(record)}))
    assert run._load(path, "k", settings, bench.said.append)["choice"] == choice, bench.said


def test_samplers_that_are_asked_for_are_those_whose_rollouts_are_checked(bench, monkeypatch):
    class Stop(Exception):
        pass

    def measuring(plan, **facts):
        assert (plan.samplers, plan.to_tune) == (3, True)
        raise Stop

    monkeypatch.setattr(run, "Measurer", measuring)
    with pytest.raises(Stop):
        bench.tune({"run": {"algo": "ppo", "mode": "hts"}, "rollout": {"samplers": 3}, "ppo": {"minibatch_size": 3}})


def test_a_user_without_a_home_has_a_cache_in_a_temporary_folder(monkeypatch, tmp_path):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(run.Path, "home", homeless)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert run.cache_dir().parent == tmp_path


def test_other_candidates_of_another_module_s_knob_are_another_question(bench, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    records = []
    for number, values in enumerate(("(0.5, 2.0)", "(0.5, 2.0)", "(0.5, 3.0)")):
        (tmp_path / "knobs_of_a_test.py").write_text(
            "from spreeze.tuner.problem import Knob\n"
            f"KNOBS = (Knob(name='learner.publish_interval_s', candidates=lambda problem, here: {values}),)\n"
            f"NUMBER = {number * 'x'!r}\n"
        )
        sys.modules.pop("knobs_of_a_test", None)
        _, record = bench.tune({"env": {"id": "Pendulum-v1", "import_module": "knobs_of_a_test"}})
        assert record["choice"]["learner.publish_interval_s"] == 0.25, "as configured: all were the same"
        records.append(len(bench.records()))
    assert records == [1, 1, 2]


def test_a_knob_of_the_algorithm_may_have_lists_as_values(bench, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "knobs_of_networks.py").write_text(
        "from spreeze.tuner.problem import Knob\n"
        "KNOBS = (Knob(name='algorithm.hidden_sizes', candidates=lambda problem, here: ([32, 32], [64])),)\n"
    )
    user = {"env": {"id": "Pendulum-v1", "import_module": "knobs_of_networks"}, "sac": {}}
    layer, record = bench.tune(user)
    tried = {rate["setting"]["sac.hidden_sizes"] for rate in record["joint_rates"]}
    assert {(32, 32), (64,)} < tried
    assert resolve([layer]).config.algorithm.hidden_sizes == record["choice"]["sac.hidden_sizes"]
    again, _ = bench.tune(user)
    assert (again, bench.measured) == (layer, 1)


def test_another_version_or_task_is_another_question(bench, monkeypatch):
    bench.tune()
    monkeypatch.setattr(run, "versions", lambda: {"torch": "other"})
    bench.tune()
    assert len(bench.records()) == 2


def test_what_does_not_matter_to_speed_is_the_same_question(bench):
    bench.tune()
    asked = bench.measured
    bench.tune({"run": {"seed": 5, "name": "other"}, "stop": {"seconds": 10.0}})
    assert bench.measured == asked


def _damages(path):
    whole = path.read_text()
    record = json.loads(whole)
    without = {name: value for name, value in record.items() if name != "notes"}
    return {
        "empty": "", "truncated": whole[: len(whole) // 2], "brace": "{", "list": "[]", "null": "null",
        "old schema": json.dumps(record | {"schema": 1}), "foreign": json.dumps(record | {"key": "0" * 16}),
        "incomplete": json.dumps(without), "no settings": json.dumps({"schema": SCHEMA, "choice": {}}),
        "deep": "[" * 100_000, "huge": whole + " " * 5_000_000,
    }  # fmt: skip


@pytest.mark.parametrize("damage", ["empty", "truncated", "brace", "list", "null", "old schema", "foreign",
                                    "incomplete", "no settings", "deep", "huge"])  # fmt: skip
def test_a_damaged_memory_is_said_and_measured_anew(bench, damage):
    bench.tune()
    asked, path = bench.measured, bench.records()[0]
    path.write_text(_damages(path)[damage])
    bench.tune()
    assert bench.measured == 2 * asked
    assert any("damaged" in line for line in bench.said)
    assert json.loads(path.read_text())["schema"] == SCHEMA
    bench.tune()
    assert bench.measured == 2 * asked


@pytest.mark.parametrize("choice", [-5, "many", None, 10**30])
def test_a_memory_with_impossible_values_is_measured_anew(bench, choice):
    bench.tune()
    asked, path = bench.measured, bench.records()[0]
    record = json.loads(path.read_text())
    record["settings"]["learner.batch_size"] = choice
    path.write_text(json.dumps(record))
    layer, _ = bench.tune()
    resolve([layer])
    assert bench.measured == 2 * asked


def test_a_failure_of_every_candidate_is_one_line_and_not_remembered(bench):
    bench.fail = True
    with pytest.raises(SpreezeError, match="it crashed"):
        bench.tune()
    assert bench.records() == []


def test_a_cache_that_cannot_be_written_only_costs_time(bench):
    bench.cache.parent.mkdir(exist_ok=True)
    bench.cache.write_text("in the way")
    layer, _ = bench.tune()
    assert layer.values


@contextlib.contextmanager
def _held(path):
    """The lock of a file, held by this process."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def test_a_lock_that_somebody_holds_for_longer_than_a_tuning_takes_ends_no_start(bench, monkeypatch):
    monkeypatch.setattr(run, "_LOCK_WAIT_S", 0.1)
    with _held(run.lock_path()):
        layer, record = bench.tune()
    assert layer.values
    waited = next(text for text in bench.said if "another tuner is measuring" in text)
    assert f"process {os.getpid()} of" in waited
    assert "at most" in waited
    assert any("still holds the tuners' lock" in text for text in bench.said)
    assert any("measured while another tuner held the lock" in note for note in record["notes"])
    assert record["provisional"] == {}, "load alone tells whether it measured something else"
    bench.tune()
    assert bench.measured == 1


def test_a_tuner_that_is_stopped_is_not_waited_for(bench):
    holder = subprocess.Popen([sys.executable, "-c", (
        "import fcntl, os, signal, sys\nfile = open(sys.argv[1], 'w')\nfcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\nos.kill(os.getpid(), signal.SIGSTOP)"), str(run.lock_path())],
        stdout=subprocess.PIPE)  # fmt: skip
    try:
        assert holder.stdout.readline() == b"held\n"
        poll(lambda: psutil.Process(holder.pid).status() == psutil.STATUS_STOPPED, what="a stopped tuner")
        _, record = bench.tune()
    finally:
        holder.kill()
        holder.communicate()
    assert any("is stopped: measuring anyway" in text for text in bench.said)
    assert not any("waiting for it" in text for text in bench.said)
    assert any(f"process {holder.pid}" in note for note in record["notes"])


def _fifo(path):
    os.mkfifo(path)


def _link_to_a_fifo(path):
    os.mkfifo(path.with_suffix(".fifo"))
    path.symlink_to(path.with_suffix(".fifo"))


def _of_another_user(path):
    path.write_text("")
    os.chown(path, 65534, 65534)
    path.chmod(0o600)


PLACES = {
    "fifo": _fifo, "directory": lambda path: path.mkdir(), "link": lambda path: path.symlink_to("/etc/passwd"),
    "link to nothing": lambda path: path.symlink_to("nowhere"), "link to a fifo": _link_to_a_fifo,
    "socket": lambda path: socket.socket(socket.AF_UNIX).bind(str(path)),
    "device": lambda path: os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5)),
    "unreadable": lambda path: (path.write_text(""), path.chmod(0)), "of another user": _of_another_user,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("place", PLACES)
def test_whatever_lies_at_the_lock_s_path_holds_nobody_up_and_stays_as_it_is(bench, place):
    path = run.lock_path()
    try:
        PLACES[place](path)
    except PermissionError:
        pytest.skip("only root can put that there")
    before = path.lstat()
    layer, record = bench.tune()
    assert layer.values
    assert record["provisional"] == {}
    assert path.lstat() == before
    if place not in ("unreadable", "of another user"):
        assert any("cannot be locked" in text for text in bench.said)
    assert not any("waiting for it" in text for text in bench.said)


def test_the_lock_file_is_readable_for_other_users_whatever_the_umask(bench):
    before = os.umask(0o077)
    try:
        bench.tune()
    finally:
        os.umask(before)
    assert run.lock_path().stat().st_mode & 0o777 == 0o644


def test_a_tuner_that_waits_can_be_interrupted(bench):
    interrupts = Interrupts()

    def say(text):
        if "another tuner" in text:
            interrupts.count = 1

    with _held(run.lock_path()), pytest.raises(KeyboardInterrupt), run.only_tuner(say, interrupts):
        pytest.fail("two tuners at once")


def test_a_lock_file_of_somebody_who_is_gone_holds_nobody_up(bench):
    run.lock_path().write_text("4242")
    run.lock_path().chmod(0o444)
    bench.tune()
    assert not any("another tuner" in text for text in bench.said)


@pytest.mark.parametrize(
    "change",
    [{"cpu_model": "another processor"}, {"cores": dataclasses.replace(MACHINE.cores, usable=0.5, quota=0.5)},
     {"cores": dataclasses.replace(MACHINE.cores, physical=77)},
     {"memory": dataclasses.replace(MACHINE.memory, total_bytes=2**33, cgroup_limit_bytes=None)},
     {"gpus": (hardware.GpuFacts(index=0, uuid="GPU-1", name="G", memory_bytes=1, memory_free_bytes=1,
                                 power_limit_w=None, clock_max_hz=None, driver="600", is_mig=False),)}],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_another_machine_is_another_question(bench, change):
    bench.tune()
    bench.machine = dataclasses.replace(MACHINE, **change)
    bench.tune()
    assert len(bench.records()) == 2


def test_rows_are_told_as_they_are_measured_and_kept_in_the_record(bench):
    _, record = bench.tune()
    stages = [row.trial for row in bench.rows]
    assert stages == sorted(stages, key=("learner", "joint").index)
    assert {"learner", "joint"} == set(stages)
    assert len(bench.rows) == len(record["update_rates"]) + len(record["joint_rates"])
    assert all(len(rate["updates_per_s"]) == 3 for rate in record["update_rates"])


@pytest.mark.parametrize(("usable", "memory_gb"), [(0.5, 8), (1.0, 8), (1.5, 2), (96.0, 512)])
def test_odd_machines_get_an_answer(bench, usable, memory_gb):
    cores = dataclasses.replace(MACHINE.cores, usable=usable, quota=usable)
    bench.machine = dataclasses.replace(MACHINE, cores=cores)
    layer, record = bench.tune()
    settings = resolve([layer])
    assert 1 <= settings.config.sampling.samplers <= max(2, usable + 1)
    assert record["machine"]["cores"]["usable"] == usable


def test_a_pinned_device_that_is_not_there_is_refused_by_name(bench):
    with pytest.raises(ConfigError, match=r"learner.device = 'cuda:0': this machine offers cpu"):
        bench.tune({"learner": {"device": "cuda"}})


def _gpus(count):
    return tuple(
        hardware.GpuFacts(index=index, uuid=f"GPU-{index}", name="G", memory_bytes=2**34, memory_free_bytes=2**33,
                          power_limit_w=None, clock_max_hz=None, driver="600", is_mig=False)
        for index in range(count)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("gpus", "actions", "offered"),
    [(0, None, {"cpu"}), (1, None, {"cpu", "cuda:0"}), (2, None, {"cpu", "cuda:0", "cuda:1", "cuda:0+cuda:1"}),
     (2, 4, {"cpu", "cuda:0", "cuda:1"})],
)  # fmt: skip
def test_two_gpus_are_also_tried_as_actor_and_critics(bench, gpus, actions, offered):
    bench.machine = dataclasses.replace(MACHINE, gpus=_gpus(gpus))
    action = Choices((actions,)) if actions else SPEC.action
    probe = dataclasses.replace(PROBE, spec=dataclasses.replace(SPEC, action=action))
    _, record = bench.tune(probe=probe)
    assert {rate["setting"]["learner.device"] for rate in record["update_rates"]} == offered


def test_two_devices_asked_for_are_tuned_around(bench):
    layer, record = bench.tune({"learner": {"device": "cpu+cpu"}})
    assert layer.values.get("learner", {}).get("device", "cpu+cpu") == "cpu+cpu"
    assert {rate["setting"]["learner.device"] for rate in record["update_rates"]} == {"cpu+cpu"}


def test_pinned_values_stay(bench):
    layer, record = bench.tune({"sampling": {"samplers": 1}, "learner": {"batch_size": 96}})
    assert layer.values["sampling"]["samplers"] == 1
    assert layer.values["learner"]["batch_size"] == 96
    assert {"sampling.samplers", "learner.batch_size"} <= set(record["pinned"])


@pytest.mark.parametrize(("others", "told"), [(0.9, True), (0.02, False), (None, False)])
def test_other_programs_that_kept_cores_busy_are_told(bench, others, told):
    bench.others = others
    _, record = bench.tune()
    assert any("other programs used 0.9" in note for note in record["notes"]) == told
    assert record["other_programs_cores"] == others


ON_BATTERY = dataclasses.replace(MACHINE, power_source="battery")


def test_a_result_made_on_battery_is_provisional_and_mains_is_another_question(bench):
    bench.machine = ON_BATTERY
    _, record = bench.tune()
    assert list(record["provisional"]) == ["battery"]
    assert any("measured on battery" in note for note in record["notes"])
    assert any("measured again by itself at a start on mains" in note for note in record["notes"])
    bench.said.clear()
    _, again = bench.tune()
    assert again["reused"]
    assert again["provisional"] == record["provisional"]
    assert any("measured on battery" in text for text in bench.said)
    bench.machine = MACHINE
    _, on_mains = bench.tune()
    assert (bench.measured, on_mains["provisional"]) == (2, {})
    bench.machine = ON_BATTERY
    bench.tune()
    assert bench.measured == 2


# --- a machine that others use too ---

BUSY = 0.9 * MACHINE.cores.usable


def test_a_result_made_beside_other_programs_is_used_told_and_measured_again_once_they_are_gone(bench):
    bench.others = BUSY
    layer, record = bench.tune()
    assert list(record["provisional"]) == ["load"]
    assert layer.values
    bench.said.clear()
    again, reused = bench.tune()
    assert (again, reused["reused"], bench.measured) == (layer, True, 1)
    for text in (f"other programs used {BUSY:.1f} of", "provisional: used now"):
        assert any(text in line for line in bench.said), text
        assert any(text in note for note in reused["notes"]), text
    bench.others = 0.6 * BUSY
    assert bench.tune()[1].get("reused"), "not much quieter"
    bench.others = 0.0
    bench.said.clear()
    _, quiet = bench.tune()
    assert (bench.measured, quiet["provisional"], quiet.get("reused")) == (2, {}, None)
    assert any("measuring again because the machine is quieter now" in line for line in bench.said)
    assert len(bench.records()) == 1
    bench.others = BUSY
    _, kept = bench.tune()
    assert (bench.measured, kept["provisional"]) == (2, {}), "a good result stays, whatever else runs later"


def test_beside_other_programs_what_is_learned_stays_as_configured(bench):
    user = {"learner": {}, "replay": {}}
    _, quiet = bench.tune(user)
    assert quiet["choice"][BATCH] != 256, "alone, another batch is better"
    bench.others = BUSY
    _, beside = bench.tune(user, fresh=True)
    assert (beside["choice"][BATCH], beside["choice"][RATIO], beside["choice"][RATIO_MAX]) == (256, 8.0, 512.0)
    assert "other programs were active" in beside["reasons"][BATCH]


@pytest.mark.parametrize("share", [0.01, 0.14])
def test_a_little_load_is_told_at_most(bench, share):
    bench.others = share * MACHINE.cores.usable
    _, record = bench.tune()
    assert record["provisional"] == {}
    assert any("--fresh measures again once they are gone" in note for note in record["notes"]) == (
        bench.others >= run._BUSY_CORES
    )


def test_where_nothing_can_be_measured_in_time_the_values_of_the_profile_are_taken(bench):
    bench.starve, bench.others = True, BUSY
    layer, record = bench.tune({"learner": {"batch_size": 96}})
    assert record["fell_back"]
    assert set(record["provisional"]) == {"rows", "load"}
    assert record["choice"][BATCH] == 96
    assert "learner" not in layer.values, "each keeps the source that it has"
    assert layer.values["sampling"]["samplers"] == record["choice"][SAMPLERS] >= 1
    assert set(record["reasons"]) == set(record["choice"])
    assert any("took no update within 23 s" in note and "profile" in note for note in record["notes"])
    bench.starve, bench.others = False, 0.0
    _, quiet = bench.tune({"learner": {"batch_size": 96}})
    assert (quiet["fell_back"], quiet["provisional"]) == (False, {})


def test_a_system_without_processes_or_disk_for_the_tuner_starts_by_the_profile(bench, monkeypatch):
    monkeypatch.setattr(FakeMeasuring, "__enter__", _no_process)
    _, record = bench.tune()
    assert record["fell_back"]
    assert "Resource temporarily unavailable" in record["provisional"]["rows"]


def _no_process(self):
    raise BlockingIOError(11, "Resource temporarily unavailable")


def test_a_result_that_stays_provisional_without_load_is_measured_a_few_times_then_once_a_day(bench, monkeypatch):
    bench.starve = True
    for tries in (1, 2, 3):
        _, record = bench.tune()
        assert (record["tries"], record.get("reused")) == (tries, None)
    _, reused = bench.tune()
    assert reused["reused"]
    a_day_later = reused["measured_s"] + 100_000.0
    monkeypatch.setattr(run.time, "time", lambda: a_day_later)
    _, again = bench.tune()
    assert (again["tries"], again.get("reused")) == (4, None)


# --- an environment of another speed or version ---


@pytest.mark.parametrize(("step_us", "again"), [(95.0, False), (26.0, False), (125.0, True), (18_500.0, True),
                                                (12.0, True)])  # fmt: skip
def test_an_environment_of_another_speed_is_measured_again_and_noise_is_not(bench, step_us, again):
    bench.tune()
    bench.said.clear()
    _, record = bench.tune(probe=dataclasses.replace(PROBE, step_us_median=step_us))
    assert bench.measured == 1 + again
    assert record["env_step_us_median"] == (step_us if again else 50.0)
    assert any(f"an env step took 50 us then and takes {step_us:.0f} us now" in text for text in bench.said) == again
    assert len(bench.records()) == 1


def test_twice_the_time_of_a_step_of_some_microseconds_is_noise(bench):
    bench.tune(probe=dataclasses.replace(PROBE, step_us_median=11.0))
    bench.tune(probe=dataclasses.replace(PROBE, step_us_median=24.0))
    assert bench.measured == 1


def test_noise_that_wanders_cannot_carry_a_result_along(bench):
    for step_us in (50.0, 90.0, 60.0, 98.0, 30.0):
        bench.tune(probe=dataclasses.replace(PROBE, step_us_median=step_us))
    assert bench.measured == 1
    bench.tune(probe=dataclasses.replace(PROBE, step_us_median=130.0))
    assert bench.measured == 2


def test_steps_too_slow_to_be_timed_are_another_speed(bench, monkeypatch):
    slow = dataclasses.replace(PROBE, step_us_median=None)
    monkeypatch.setattr(run, "probe_of", lambda config, **more: slow)
    bench.tune(probe=slow)
    bench.tune(probe=slow)
    assert bench.measured == 1
    bench.tune()
    assert bench.measured == 2


@pytest.mark.parametrize("packages", [{"gymnasium": "1.2.0"}, {"gymnasium": "1.0.0", "mujoco": "3.3.1"}, {}], ids=str)
def test_another_version_of_the_environment_s_packages_is_another_question(bench, packages):
    bench.tune(probe=dataclasses.replace(PROBE, packages={"gymnasium": "1.0.0"}))
    bench.tune(probe=dataclasses.replace(PROBE, packages=packages))
    assert len(bench.records()) == 2


def test_a_record_with_odd_notes_or_causes_is_measured_anew(bench):
    bench.tune()
    (path,) = bench.records()
    good = json.loads(path.read_text())
    for odd in ({"provisional": ["load"]}, {"provisional": {"load": "x"}, "other_programs_cores": None}, {"notes": [1]},
                {"provisional": {"other": "x"}}, {"measured_s": "x"}, {"tries": float("nan")},
                {"env_step_us_median": "1"}):  # fmt: skip
        path.write_text(json.dumps(good | odd))
        asked = bench.measured
        _, record = bench.tune()
        assert bench.measured == asked + 1, odd
        assert record["provisional"] == {}
