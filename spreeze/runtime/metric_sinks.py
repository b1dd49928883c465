"""Metric sinks: TensorBoard, Weights & Biases, MLflow, trackio.

Each sink runs in a process of its own, started by ``runtime.loggers``. It gets one JSON document a line over a socket
and answers each row with the number of rows done.

A series has the same name in all sinks: the group of its chart, then its name in the metric table, such as
``Speed/updates_per_s``. The step is the number of env steps, as in ``metrics.db``.
"""

from __future__ import annotations

import contextlib
import math
import netrc
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from spreeze.formatting import clean
from spreeze.runtime import socket_process
from spreeze.runtime.socket_process import Send, TakeRow

NICE = 15  # niceness, equal to the visualizer's: the imports take seconds of a core
_CLIP_LOOK_S = 5.0
_MAX_CLIP_BYTES = 20_000_000
_MAX_EVENTS = 500  # Most events of one session, in a sink that rewrites them all at each one.
_WANDB_OPEN_S = 20.0
"""After this time the run is kept offline; shorter than a run waits at its end for a sink that is not open yet."""
_WANDB_HOST = "api.wandb.ai"
_ID = re.compile(r"^[A-Za-z0-9_-]{1,64}$")


class Opening(NamedTuple):
    """Facts on the run that a sink gets at its start."""

    sink: str
    run_dir: str
    project: str  # project of Weights & Biases and of trackio, experiment of MLflow
    settings: dict[str, Any]
    facts: dict[str, str]  # machine, versions and the like, as text
    known: dict[str, str]  # values that the sink stored in an earlier session of the run

    @property
    def path(self) -> Path:
        return Path(self.run_dir)


class Moment(NamedTuple):
    """When something happened."""

    at_s: float  # seconds since 1970
    wall_s: float  # seconds since the run started, without pauses
    step: int  # env steps


class MetricSink(Protocol):
    """A method may raise anything: the sink is then switched off, and the run continues."""

    def write(self, moment: Moment, values: Mapping[str, float]) -> None:
        """The values of one time, all finite, by the name of their series."""

    def event(self, moment: Moment, level: str, text: str) -> None: ...

    def clip(self, moment: Moment, path: Path) -> None:
        """A new MP4 file of the current policy."""

    def close(self, *, failed: bool) -> None:
        """The end of the session; ``failed`` if the run ended by an error."""


class TensorBoardSink:
    """Event files in ``tensorboard/`` of the run directory; a resumed run adds a file there."""

    def __init__(self, opening: Opening, send: Send) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        writer: Any = SummaryWriter
        self._writer = writer(str(opening.path / "tensorboard"), flush_secs=10)
        if not opening.known:
            summaries: Any = hparams
            known = [(key, value) for key, value in opening.settings.items() if value is not None]
            flat = {key: value if isinstance(value, bool | int | float) else clean(value, 200) for key, value in known}
            for summary in summaries(flat, {"Return/eval_return": 0.0})[:2]:
                self._writer.file_writer.add_summary(summary)
        self._writer.add_text("settings", _table(opening.settings))
        self._writer.add_text("facts", _table(opening.facts))
        view = f"view it with tensorboard --logdir {shlex.quote(str(opening.path.parent))}"
        send(known={"folder": "tensorboard"}, event=("info", view))

    def write(self, moment: Moment, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, moment.step, moment.at_s)

    def event(self, moment: Moment, level: str, text: str) -> None:
        self._writer.add_text("events", f"**{level}** {_escaped(text)}", moment.step, moment.at_s)

    def clip(self, moment: Moment, path: Path) -> None:
        """Does nothing: TensorBoard shows clips as GIF only, many times as large."""

    def close(self, *, failed: bool) -> None:
        self._writer.close()


class WandbSink:
    """One run of Weights & Biases, in ``wandb/`` beside the runs, which a resume continues; offline if it must."""

    def __init__(self, opening: Opening, send: Send) -> None:
        import wandb

        self._library: Any = wandb
        configured = os.environ.get("WANDB_MODE")
        default = str(getattr(self._library.Settings(), "base_url", ""))
        mode, why = ("online", "") if _has_wandb_key(default) else ("offline", "no API key found")
        try:
            self._run = self._started(opening, configured or mode)
        except Exception as error:
            if configured or mode == "offline":
                raise
            mode, why = "offline", clean(f"{type(error).__name__}: {error}", 200)
            self._run = self._started(opening, mode)
        self._run.define_metric("env_steps", hidden=True)
        self._run.define_metric("*", step_metric="env_steps")
        send(known={"id": str(self._run.id)})
        if why and not configured:
            folder = shlex.quote(str(Path(str(self._run.dir)).parent))
            send(event=("info", f"{why}, so the run is stored offline; upload it with wandb sync {folder}"))
        elif getattr(self._run, "url", None):
            send(event=("info", f"view it at {self._run.url}"))

    def _started(self, opening: Opening, mode: str) -> Any:
        known = opening.known.get("id", "")
        return self._library.init(
            project=os.environ.get("WANDB_PROJECT") or opening.project,
            name=opening.path.name,
            id=known if _ID.match(known) else None,
            resume="allow",
            mode=mode,
            # Beside the runs: a run directory with one of its links in it could not be resumed.
            dir=str(opening.path.parent),
            config={**opening.settings, **opening.facts},
            settings=self._library.Settings(init_timeout=_WANDB_OPEN_S),
        )

    def write(self, moment: Moment, values: Mapping[str, float]) -> None:
        self._run.log({**values, "env_steps": moment.step, "wall_s": moment.wall_s})

    def event(self, moment: Moment, level: str, text: str) -> None:
        print(f"{moment.wall_s:.1f} s  {level}: {text}", flush=True)  # noqa: T201 - wandb takes it into the run's log

    def clip(self, moment: Moment, path: Path) -> None:
        self._run.log({"clip": self._library.Video(str(path), format="mp4"), "env_steps": moment.step})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
        self._library.teardown()  # the process that it started


class MlflowSink:
    """One MLflow run, which a resumed run continues; in ``mlflow.db`` beside the runs if no server is named."""

    def __init__(self, opening: Opening, send: Send) -> None:
        os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
        import mlflow.entities

        where, local = os.environ.get("MLFLOW_TRACKING_URI"), opening.path.parent / "mlflow.db"
        if not where and not local.exists():
            _make_database(mlflow.MlflowClient, local)
        self._entities: Any = mlflow.entities
        self._client: Any = mlflow.MlflowClient(tracking_uri=where or f"sqlite:///{local}")
        self._events: list[str] = []
        self._run_id = self._continued(opening)
        if not self._run_id:
            tags = {key: clean(value, 500) for key, value in opening.facts.items()}
            experiment = self._experiment(opening, local=not where)
            self._run_id = self._client.create_run(experiment, run_name=opening.path.name, tags=tags).info.run_id
            params = [self._entities.Param(key, clean(value, 500)) for key, value in opening.settings.items()]
            for start in range(0, len(params), 100):  # its limit of one call
                self._client.log_batch(self._run_id, params=params[start : start + 100])
        if (opening.path / "config.toml").is_file():
            self._client.log_artifact(self._run_id, str(opening.path / "config.toml"))
        send(known={"run_id": self._run_id})
        if not where:  # an address may hold a password
            send(event=("info", f"view it with mlflow ui --backend-store-uri {shlex.quote(f'sqlite:///{local}')}"))

    def _continued(self, opening: Opening) -> str:
        """The id of the run's earlier sessions, running again; empty if there is none."""
        known = opening.known.get("run_id", "")
        if not _ID.match(known):
            return ""
        try:
            self._client.get_run(known)
        except Exception:  # another server, or it was deleted there: a new one is made
            return ""
        self._client.update_run(known, status="RUNNING")
        return known

    def _experiment(self, opening: Opening, *, local: bool) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or opening.project
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            return str(experiment.experiment_id)
        artifacts = str((opening.path.parent / "mlartifacts").absolute()) if local else None
        return str(self._client.create_experiment(name, artifact_location=artifacts))

    def write(self, moment: Moment, values: Mapping[str, float]) -> None:
        at_ms = int(1000 * moment.at_s)
        metrics = [self._entities.Metric(name, value, at_ms, moment.step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def event(self, moment: Moment, level: str, text: str) -> None:
        if len(self._events) < _MAX_EVENTS:
            self._events.append(f"{moment.wall_s:.1f} s  {level}: {text}\n")
            self._client.log_text(self._run_id, "".join(self._events), f"events-{os.getpid()}.txt")

    def clip(self, moment: Moment, path: Path) -> None:
        self._client.log_artifact(self._run_id, str(path), "videos")

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")


def _make_database(client: Callable[..., Any], path: Path) -> None:
    """Makes MLflow's tables, in seconds; the file appears when whole, since a partial set could never be opened."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    client(tracking_uri=f"sqlite:///{fresh}").search_experiments(max_results=1)
    with contextlib.suppress(FileExistsError):
        os.link(fresh, path)
    fresh.unlink()


class TrackioSink:
    """One run of trackio, which a resumed run continues; in ``trackio/`` beside the runs if no folder is named."""

    def __init__(self, opening: Opening, send: Send) -> None:
        folder = os.environ.setdefault("TRACKIO_DIR", str((opening.path.parent / "trackio").absolute()))
        import trackio

        self._library: Any = trackio
        project = os.environ.get("TRACKIO_PROJECT") or opening.project
        self._run = self._library.init(
            project=project,
            name=opening.path.name,
            resume="allow",
            config={**opening.settings, **opening.facts},
            embed=False,
            auto_log_cpu=False,  # Spreeze measures the machine itself
            auto_log_gpu=False,
        )
        command = f"TRACKIO_DIR={shlex.quote(folder)} trackio show --project {shlex.quote(project)}"
        send(known={"project": project}, event=("info", f"view it with {command}"))

    def write(self, moment: Moment, values: Mapping[str, float]) -> None:
        self._run.log({**values, "wall_s": moment.wall_s}, step=moment.step)

    def event(self, moment: Moment, level: str, text: str) -> None:
        levels = self._library.AlertLevel
        kind = {"warning": levels.WARN, "error": levels.ERROR}.get(level, levels.INFO)
        self._run.alert(title=f"{moment.wall_s:.1f} s  {clean(text, 500)}", level=kind)

    def clip(self, moment: Moment, path: Path) -> None:
        self._run.log({"clip": self._library.Video(str(path), format="mp4")}, step=moment.step)

    def close(self, *, failed: bool) -> None:
        self._run.finish()


SINKS: dict[str, Callable[[Opening, Send], MetricSink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "mlflow": MlflowSink,
    "trackio": TrackioSink,
}
"""Sinks by their name in ``logging.sinks``, which is also that of package and extra.

A sink has the methods of these four: ``write`` gets finite values by the names of their series, ``clip`` an MP4 file.
If one raises, the sink is switched off, and the run continues.
"""


def _has_wandb_key(default_url: str = "") -> bool:
    """True if Weights & Biases would find a key without asking: in the environment or in ``.netrc``."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or default_url).hostname or _WANDB_HOST
    files = [os.environ["NETRC"]] if "NETRC" in os.environ else ["~/.netrc", "~/_netrc"]
    for name in files:
        with contextlib.suppress(OSError, netrc.NetrcParseError, UnicodeDecodeError):
            if netrc.netrc(os.path.expanduser(name)).authenticators(host):
                return True
    return False


def _table(values: Mapping[str, Any]) -> str:
    rows = [f"| {_escaped(key)} | {_escaped(value)} |" for key, value in values.items()]
    return "\n".join(["| name | value |", "|---|---|", *rows])


def _escaped(text: object) -> str:
    return re.sub(r"([\\`*_\[\]<>|~#])", r"\\\1", clean(text, 500))


def _clips(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "videos").glob("clip-*.mp4"))


def opened(first: dict[str, Any], send: Send) -> TakeRow:
    """Opens the sink that the first row names, and hands it all others."""
    opening = Opening(**first)
    # Clips of an earlier session were logged then; those that come before the sink is open are new.
    seen, next_look_s = set(_clips(opening.path)), 0.0
    sink = SINKS[opening.sink](opening, send)

    def take(row: dict[str, Any]) -> None:
        nonlocal next_look_s
        if "end" in row:
            sink.close(failed=bool(row["end"]))
            return
        moment = Moment(*row["moment"])
        if "event" in row:
            sink.event(moment, *row["event"])
            return
        sink.write(moment, {name: value for name, value in row["values"].items() if math.isfinite(value)})
        if moment.wall_s >= next_look_s:
            next_look_s = moment.wall_s + _CLIP_LOOK_S
            for path in [path for path in _clips(opening.path) if path not in seen]:
                seen.add(path)
                if not path.is_symlink() and path.stat().st_size <= _MAX_CLIP_BYTES:
                    sink.clip(moment, path)

    return take


def main(argv: list[str]) -> None:
    """The process of one sink; ``argv`` has the descriptor of its socket."""
    socket_process.run(argv, opened, nice=NICE, describe=lambda error: clean(f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    main(sys.argv[1:])
