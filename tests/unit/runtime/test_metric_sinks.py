"""Sinks of ``--log``: the numbers of the store arrive, and none can end, stop or slow a run."""

import fcntl
import json
import os
import resource
from types import SimpleNamespace

import harness
import pytest
from harness import FAULT, poll

from spreeze.cli.arguments import build_parser, user_values
from spreeze.config.layers import Layer, resolve
from spreeze.errors import ConfigError
from spreeze.metrics.store import EvaluationRow, MetricsReader
from spreeze.run_directory import RunDir, refuse_links
from spreeze.runtime import loggers, metric_sinks

STAND_INS = {
    "wandb": """
import json, os, types
class Run:
    def __init__(self, **kwargs):
        self.id, self.dir = kwargs["id"] or "new-id", kwargs["dir"] + "/wandb/offline-run/files"
        self.file = open(os.environ["STAND_IN"], "a")
        self.note(init={key: kwargs[key] for key in ("project", "name", "id", "mode")})
    def note(self, **fields):
        self.file.write(json.dumps(fields) + "\\n")
        self.file.flush()
    def define_metric(self, *args, **kwargs): pass
    def log(self, values): self.note(log=values)
    def finish(self, exit_code): self.note(finish=exit_code)
Settings = types.SimpleNamespace
init = lambda **kwargs: Run(**kwargs)
teardown = lambda: None
""",
    "mlflow": """
import json, os, sys, types
entities = types.ModuleType("mlflow.entities")
sys.modules["mlflow.entities"] = entities
entities.Metric = lambda *args: args
entities.Param = lambda *args: args
class MlflowClient:
    def __init__(self, tracking_uri):
        self.file = open(os.environ["STAND_IN"], "a")
        self.note("open", tracking_uri)
        self.path = tracking_uri.removeprefix("sqlite:///")
    def note(self, *what):
        self.file.write(json.dumps(what) + "\\n")
        self.file.flush()
    def search_experiments(self, max_results): open(self.path, "w").close()
    def get_experiment_by_name(self, name): return None
    def create_experiment(self, name, artifact_location): return "1"
    def create_run(self, experiment, run_name, tags):
        self.note("create", run_name)
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))
    def get_run(self, run_id): assert run_id == "r1"
    def update_run(self, run_id, status): self.note(status, run_id)
    def log_batch(self, run_id, metrics=(), params=()): self.note("batch", metrics, params)
    def log_artifact(self, *args): self.note("artifact", *args)
    def log_text(self, *args): self.note("text", *args)
    def set_terminated(self, run_id, status): self.note(status, run_id)
""",
    "trackio": """
import json, os, types
AlertLevel = types.SimpleNamespace(INFO="info", WARN="warn", ERROR="error")
Video = lambda path, format: path
def note(*what):
    with open(os.environ["STAND_IN"], "a") as file:
        file.write(json.dumps(what) + "\\n")
class Run:
    def log(self, values, step): note("log", values, step)
    def alert(self, title, level): note("alert", title, level)
    def finish(self): note("finish")
def init(**given):
    note("init", *(given[key] for key in ("project", "name", "resume")), os.environ["TRACKIO_DIR"])
    return Run()
""",
    "failing": "raise OSError('No space left on device')",
    "hanging": "import signal\nwhile True: signal.pause()",
}
ROW = EvaluationRow(t=1.0, env_steps=40, updates=7, epoch=1, version=7, episodes=2, return_mean=-3.5, return_std=0.5,
                    length_mean=20.0)  # fmt: skip


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Starts loggers with stand-ins for packages by name, None for the real one; what they are told, the events."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("STAND_IN", str(tmp_path / "told"))
    events, run_dirs = [], []

    def put(**packages):
        folder = tmp_path / "packages"
        folder.mkdir(exist_ok=True)
        for name, kind in packages.items():
            if kind is not None:
                (folder / f"{name}.py").write_text(STAND_INS[kind])
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)

    def start(**packages):
        put(**packages)
        config = resolve([Layer("user", {"logging": {"sinks": list(packages)}, "run": {"seed": 5}})]).config
        fresh = not (tmp_path / "runs" / "r").exists()
        run_dir = RunDir.create(tmp_path / "runs", "r") if fresh else RunDir.open(tmp_path / "runs" / "r")
        if fresh:
            run_dir.write_state(state="running", machine="two cores")
        run_dirs.append(run_dir)
        found = loggers.Loggers(lambda level, text: events.append(text))
        found.start(SimpleNamespace(config=config, reasons={}), run_dir)
        return found

    yield SimpleNamespace(
        start=start,
        packages=put,
        events=events,
        path=tmp_path / "runs" / "r",
        close=lambda: run_dirs.pop().close(),
        told=lambda: [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()],
    )
    for run_dir in run_dirs:
        run_dir.close()


def test_wandb_gets_every_row_offline_where_there_is_no_key_and_a_resumed_run_keeps_its_id(made):
    for _ in range(2):
        logged = made.start(wandb="wandb")
        logged.sample(0.5, 16, {"updates_per_s": 3.25, "critic_loss": float("nan")})
        logged.evaluation(ROW)
        logged.close(failed=False)
        made.close()
    told = made.told()
    inits = [row["init"] for row in told if "init" in row]
    assert inits[0] == {"project": "spreeze", "name": "r", "id": None, "mode": "offline"}
    assert inits[1]["id"] == "new-id"
    assert told[1] == {"log": {"Speed/updates_per_s": 3.25, "env_steps": 16, "wall_s": 0.5}}
    assert told[2]["log"]["Evaluation/return_mean"] == -3.5
    assert told[3] == {"finish": 0}
    assert any("upload it with wandb sync" in text for text in made.events)


def test_mlflow_gets_rows_settings_and_events_and_a_resumed_run_goes_on_there(made):
    for failed in (False, True):
        logged = made.start(mlflow="mlflow")
        logged.write(2.0, 30, {"eval_return": 1.5})
        logged.event(2.0, "warning", "sampler-0", "died")
        logged.close(failed=failed)
        made.close()
    told = made.told()
    opened = [row[1] for row in told if row[0] == "open"]
    assert opened[1:] == [f"sqlite:///{made.path.parent}/mlflow.db"] * 2
    assert opened[0].endswith(".tmp"), "a database whose making is interrupted is never taken for one"
    assert sorted(path.name for path in made.path.parent.iterdir()) == ["mlflow.db", "r"]
    assert [row for row in told if row[0] == "create"] == [["create", "r"]]
    params = [param for row in told if row[0] == "batch" for param in row[2]]
    assert ["run.seed", "5"] in params
    metrics = [metric for row in told if row[0] == "batch" for metric in row[1]]
    assert [(name, value, step) for name, value, _, step in metrics] == [("Return/eval_return", 1.5, 30)] * 2
    assert any(row[0] == "text" and row[2] == "2.0 s  warning: sampler-0: died\n" for row in told)
    assert [row[0] for row in told if row[0].isupper()] == ["FINISHED", "RUNNING", "FAILED"]


def test_trackio_gets_rows_and_events_in_a_folder_beside_the_runs_and_a_resumed_run_goes_on_there(made):
    for _ in range(2):
        logged = made.start(trackio="trackio")
        logged.sample(0.5, 16, {"updates_per_s": 3.25, "critic_loss": float("nan")})
        logged.event(2.0, "warning", "sampler-0", "died")
        logged.close(failed=False)
        made.close()
    told = made.told()
    assert [row for row in told if row[0] == "init"] == [
        ["init", "spreeze", "r", "allow", str(made.path.parent / "trackio")]
    ] * 2
    assert ["log", {"Speed/updates_per_s": 3.25, "wall_s": 0.5}, 16] in told
    assert ["alert", "2.0 s  sampler-0: died", "warn"] in told
    assert told[-1] == ["finish"]
    assert any("trackio show --project spreeze" in text for text in made.events)


def test_the_real_trackio_stores_each_series_at_its_env_steps_and_a_clip(made, monkeypatch, tmp_path):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    trackio = pytest.importorskip("trackio", reason="pip install -e '.[trackio]'")
    clip = tmp_path / "clip-0001-v1.mp4"
    clip.write_bytes(b"clip")
    opening = metric_sinks.Opening("trackio", str(made.path), "spreeze", {"sac.gamma": 0.9}, {"machine": "m"}, {})
    for step in (16, 32):  # the second one as a resumed run
        sink = metric_sinks.TrackioSink(opening, lambda **fields: None)
        sink.write(metric_sinks.Moment(1.0, 0.5, step), {"Speed/updates_per_s": 3.25})
        sink.clip(metric_sinks.Moment(1.0, 0.5, step), clip)
        sink.close(failed=False)
    rows = trackio.SQLiteStorage.get_logs("spreeze", made.path.name)
    speeds = [(row["step"], row["Speed/updates_per_s"]) for row in rows if "Speed/updates_per_s" in row]
    assert speeds == [(16, 3.25), (32, 3.25)]
    assert [row["clip"]["_type"] for row in rows if "clip" in row] == ["trackio.video"] * 2


@pytest.fixture
def scalars():
    """Reads all event files of a run as TensorBoard does: series -> [(step, value)]."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def read(run):
        found = reader.EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
        return {name: [(event.step, event.value) for event in found.Scalars(name)] for name in found.Tags()["scalars"]}

    return read


def test_a_sink_that_fails_is_an_event_and_the_others_get_everything(made, scalars):
    logged = made.start(tensorboard=None, mlflow="failing")
    for step in range(5):
        logged.sample(float(step), step, {"updates_per_s": step + 0.5})
    poll(lambda: logged.poll() or any("is disabled" in text for text in made.events))
    logged.event(5.0, "info", "supervisor", "still here")
    logged.close(failed=False)
    (text,) = [text for text in made.events if "mlflow is disabled" in text]
    assert f"tensorboard: view it with tensorboard --logdir {made.path.parent}" in made.events
    assert text.startswith("mlflow is disabled; the run continues: OSError: No space left on device; ")
    assert scalars(made.path)["Speed/updates_per_s"] == [(step, step + 0.5) for step in range(5)]


@pytest.mark.parametrize("limit", ["OPEN_S", "CLOSE_S"])
def test_a_sink_that_hangs_is_switched_off_and_its_rows_are_counted(made, monkeypatch, limit):
    monkeypatch.setattr(loggers, limit, 0.05)
    monkeypatch.setattr(loggers, "MAX_ROWS", 3)
    logged = made.start(wandb="hanging")
    (sink,) = logged._sinks
    monkeypatch.setattr(sink, "_send", lambda: None)  # as if the socket were full
    for step in range(10):
        logged.sample(step / 1e4, step, {"updates_per_s": 1.0})
    if limit == "OPEN_S":
        poll(lambda: logged.poll() or not sink.open)
    logged.close(failed=False)
    assert made.events[0] == "wandb does not keep up; the oldest rows are dropped"
    assert made.events[-1].startswith("wandb is disabled; the run continues: no answer for ")
    lost = 11 if limit == "OPEN_S" else 12  # with the opening row, and the one that ends it
    assert f"; {lost} rows were not logged" in made.events[-1]


IMPATIENT = """
import sys
from spreeze.cli import train
from spreeze.runtime.loggers import Sink
def end(self, *, failed, before=Sink.end):
    before(self, failed=failed)
    self._limits_s = (0.1, 0.1) if self.name == "wandb" else self._limits_s
Sink.end = end
sys.exit(train.main())
"""
"""``spreeze train`` that does not wait long for one sink at the end."""


@pytest.mark.slow
def test_a_run_and_its_resumption_log_what_the_store_has_though_other_sinks_hang_and_fail(made, scalars, tmp_path):
    made.packages(wandb="hanging", mlflow="failing")
    for args in (
        ["--name", "real", *FAULT, "--updates", "60"],
        ["--resume", "real", "--import", "fault_envs", "--mode", "serial", "--updates", "90"],
    ):
        run, code, document = harness.train(
            tmp_path, *args, "--log", "tensorboard,wandb,mlflow", program=("-c", IMPATIENT)
        )
        assert (code, document["stopped_by"]) == (0, "updates"), run.stderr
    path = tmp_path / "runs" / "real"
    reader = MetricsReader(path / "metrics.db")
    texts = [event.text for event in reader.events(1000)]
    assert sum(text.startswith("wandb is disabled") for text in texts) == 2
    assert sum(text.startswith("mlflow is disabled") for text in texts) == 2
    logged = scalars(path)
    for tag in ("More/updates", "Return/eval_return", "Learning/critic_loss"):
        (points,) = reader.tail([tag.split("/")[1]], -1.0).values()
        assert logged[tag] == [(point.step, pytest.approx(point.value, rel=1e-6)) for point in points]
    evaluations = [(row.env_steps, pytest.approx(row.return_mean)) for row in reader.evaluations()]
    assert logged["Evaluation/return_mean"] == evaluations
    assert len(list((path / "tensorboard").iterdir())) == 2
    refuse_links(path)


@pytest.mark.parametrize("found", [None, SimpleNamespace(origin=None)], ids=["nothing", "a folder of that name"])
def test_a_sink_without_its_package_is_refused_with_the_command_that_installs_it(monkeypatch, found):
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda name: found)
    with pytest.raises(ConfigError, match=r"--log mlflow: .* pip install 'spreeze\[mlflow\]'"):
        loggers.check_sinks(["mlflow"])


def test_the_end_waits_for_sinks_whose_descriptors_are_above_1023():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("this process may not open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    logged = loggers.Loggers(lambda level, text: None)
    try:
        with open(os.devnull, "rb") as null:
            sink = SimpleNamespace(
                open=True,
                end=lambda failed: None,
                late=lambda: None,
                reap=lambda: None,
                fileno=lambda: high,
                poll=lambda: setattr(sink, "open", False),
            )
            high = fcntl.fcntl(null, fcntl.F_DUPFD, 1024)
            logged._sinks.append(sink)
            logged.close(failed=False)
            os.close(high)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not sink.open


def test_sinks_are_named_with_commas_and_a_wrong_name_is_told():
    values = user_values(build_parser().parse_args(["--log", "tensorboard, wandb"]))
    assert resolve([Layer("user", values)]).config.logging.sinks == ("tensorboard", "wandb")
    values = user_values(build_parser().parse_args(["--log", ""]))
    assert (
        resolve([Layer("resumed run", {"logging": {"sinks": ["mlflow"]}}), Layer("user", values)]).config.logging.sinks
        == ()
    )
    with pytest.raises(ConfigError, match="did you mean 'tensorboard'"):
        resolve([Layer("user", {"logging": {"sinks": ["tensorbord"]}})])


def test_the_page_starts_a_run_with_the_same_flag():
    control = pytest.importorskip("spreeze.dashboard.control")
    request = control.Request(env_id="Pendulum-v1", settings={"logging.sinks": ("tensorboard", "wandb")})
    assert control.arguments(request)[-1] == "--log=tensorboard,wandb"


@pytest.mark.parametrize(("line", "known"), [
    ("machine api.wandb.ai login user password 0123", True), ("machine example.org login user password 0123", False),
])  # fmt: skip
def test_a_key_of_wandb_is_found_without_asking(tmp_path, monkeypatch, line, known):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / ".netrc").write_text(line)
    (tmp_path / ".netrc").chmod(0o600)
    assert metric_sinks._has_wandb_key() is known
