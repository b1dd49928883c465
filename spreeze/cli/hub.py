"""``python -m spreeze push``: a run's policy, with a page about it, to a model hub (extra ``hub``).

``python -m spreeze pull``: a policy from a model hub as the directory of a run, which the other commands take.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from spreeze.cli.arguments import Parser, as_argument, print_result
from spreeze.cli.evaluate import read_policy
from spreeze.config.schema import check_name
from spreeze.errors import ConfigError, HubError, RunError, UsageError
from spreeze.files import read_json, write_json
from spreeze.formatting import clean, size
from spreeze.machine.output import say
from spreeze.metrics import model_card
from spreeze.metrics.model_card import CLIP, CURVE
from spreeze.metrics.published_returns import published
from spreeze.run_directory import check_format, find_run, is_alive, make_runs_dir, read_run, refuse_links
from spreeze.workers.evaluator import read_rows

POLICY = "checkpoints/best.safetensors"
CARD = "README.md"
FILES = (CARD, CURVE, POLICY, "run.json", "config.toml", "summary.json", "eval.csv", CLIP)
"""All files that ``push`` sends and ``pull`` accepts; paths as in the directory of a run."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_PUBLIC = (
    "format", "state", "env_id", "algo", "mode", "data_flow", "seed", "exit_reason", "versions", "machine", "started",
    "wall_s", "env_steps", "updates", "eval_best", "eval_final", "episodes",
)  # fmt: skip
"""Fields of ``run.json`` that are sent; the command, process and host are not."""
_PRIVATE = ("run_dir", "reasons")
_LOCAL_PATHS = re.compile(rf"(?m)^({'|'.join(model_card.LOCAL_SETTINGS)}) = .*\n")
_MAX_CLIP_BYTES = 20_000_000


def check_repository(name: str, flag: str) -> str:
    """Returns the name of a repository; a ConfigError if it is not ``OWNER/NAME``."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{flag} {clean(name, 100)}: expected OWNER/NAME, as the hub has it")
    return name


def library() -> Any:
    """The package ``huggingface_hub``; a ConfigError if it is not installed."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ConfigError("this needs huggingface_hub: pip install 'spreeze[hub]'")
    return importlib.import_module("huggingface_hub")


@contextlib.contextmanager
def hub_errors(doing: str) -> Iterator[None]:
    """Turns any exception of the hub's library into a HubError of one line."""
    try:
        yield
    except Exception as error:
        remedy = "log in with: hf auth login (or set HF_TOKEN), and check name and network"
        raise HubError(f"{doing} failed: {type(error).__name__}: {clean(error, 300)}; {remedy}") from None


def push(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m spreeze push",
        description="Send a run's best policy to a repository of the Hugging Face hub: weights, settings, evaluations, "
        "newest clip, and a page with returns, curve and versions. The repository is made where there is none.",
    )
    parser.add_argument("run", metavar="RUN", help="name, path, or latest")
    parser.add_argument("--to", metavar="OWNER/NAME", required=True, help="the repository (required)")
    parser.flag("--private", text="make a new repository private", default=False)
    parser.flag("--yes", text="send without asking, for scripts", default=False)
    parser.add_common_flags()
    return parser.run(argv, _push)


def _push(args: argparse.Namespace) -> int:
    name, run = check_repository(args.to, "--to"), find_run(args.run, Path(args.runs_dir))
    api = library().HfApi()
    if is_alive(run):
        raise RunError(f"{run.name} is still running: push it after its end (python -m spreeze runs stop {run.name})")
    refuse_links(run)  # a link could point to any file, which would be sent
    with tempfile.TemporaryDirectory(prefix="spreeze-push-") as temporary:
        folder = Path(temporary)
        lines = gather(run, name, folder)
        files = [path for path in folder.rglob("*") if path.is_file()]
        sent = sorted(path.relative_to(folder).as_posix() for path in files)
        total_bytes = sum(path.stat().st_size for path in files)
        visibility = "private" if args.private else "public"
        summary = f"{run.name} -> {name} at {clean(api.endpoint, 200)}, {visibility} if it is new"
        for line in (summary, f"{len(sent)} files, {size(total_bytes)}: {', '.join(sent)}", *lines):
            say(line, as_json=args.json)
        if not args.yes and not _agreed():
            raise UsageError("nothing was sent: answer y, or give --yes")
        with hub_errors(f"push to {name}"):
            url = str(api.create_repo(repo_id=name, repo_type="model", private=args.private, exist_ok=True))
            api.upload_folder(repo_id=name, repo_type="model", folder_path=str(folder),
                              commit_message=f"{run.name}, trained with Spreeze")  # fmt: skip
    document = {"repository": name, "url": url, "run": run.name, "files": sent, "bytes": total_bytes}
    return print_result(
        args, document, f"sent: {url}\nanyone with read access can download it with: spreeze pull {name}"
    )


def _agreed() -> bool:
    """True if the user at a terminal confirms; False in a script."""
    if not sys.stdin.isatty():
        return False
    say("send it? [y/N]", as_json=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def gather(run: Path, name: str, folder: Path) -> list[str]:
    """Collects the files to send for a run in a folder; returns additional lines to print before sending.

    Raises a RunError if the run has no best policy or no settings, a WeightsError if the policy is damaged.
    """
    weights_file = run / POLICY
    if not weights_file.is_file() or not (run / "config.toml").is_file():
        raise RunError(
            f"{run.name} has no evaluated policy to push; train it until its first evaluation: python -m spreeze.train "
            f"--resume {run.name}"
        )
    _, spec = read_policy(weights_file)
    (folder / POLICY).parent.mkdir()
    shutil.copyfile(weights_file, folder / POLICY)
    state = {key: value for key, value in read_run(run).items() if key in _PUBLIC}
    summary = {key: value for key, value in read_json(run / "summary.json").items() if key not in _PRIVATE}
    for file, data in (("run.json", state), ("summary.json", summary)):
        (folder / file).write_text(json.dumps(data, indent=1), encoding="utf-8")
    config = (run / "config.toml").read_text(encoding="utf-8", errors="replace")
    (folder / "config.toml").write_text(_LOCAL_PATHS.sub("", config), encoding="utf-8")
    if (run / "eval.csv").is_file():
        shutil.copyfile(run / "eval.csv", folder / "eval.csv")
    clips = sorted((run / "videos").glob("clip-*.mp4"), key=lambda path: path.stat().st_mtime)
    files = [path for path in (run / CLIP, *clips) if path.is_file() and not path.is_symlink()]
    clips = [path for path in files if path.stat().st_size <= _MAX_CLIP_BYTES]
    if clips:
        shutil.copyfile(clips[-1], folder / CLIP)
    points = [(int(row["env_steps"]), float(row["return_mean"])) for row in read_rows(run / "eval.csv")]
    points = [point for point in points if math.isfinite(point[1])]
    if points:
        reference = published(clean(state.get("env_id"), 100))
        (folder / CURVE).write_bytes(model_card.curve(points, reference))
    (folder / CARD).write_text(model_card.card(run, name, points, clip=bool(clips)), encoding="utf-8")
    module = clean(spec.import_module, 200)
    return [f"the environment's module is named, its code is not sent: {module}"] if spec.import_module else []


def pull(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m spreeze pull",
        description="Take a policy that push has sent to the Hugging Face hub into the directory of the runs. Nothing "
        "of it is executed or imported.",
    )
    parser.add_argument("repository", metavar="OWNER/NAME", help="the repository")
    parser.flag("--revision", text="branch, tag or commit", shown="the newest", metavar="R")
    parser.flag("--name", text="name of its directory", shown="that of the repository")
    parser.add_common_flags()
    return parser.run(argv, _pull)


def _pull(args: argparse.Namespace) -> int:
    repository = check_repository(args.repository, "pull")
    name, runs_dir = check_name(args.name or repository.rpartition("/")[2]), Path(args.runs_dir)
    target = runs_dir / name
    if target.exists():
        raise RunError(f"{target} exists: choose another --name")
    hub = library()
    make_runs_dir(runs_dir)
    with tempfile.TemporaryDirectory(dir=runs_dir, prefix=".tmp-pull-") as temporary:
        downloaded, accepted = Path(temporary) / "downloaded", Path(temporary) / "accepted"
        with hub_errors(f"pull of {repository}"):
            hub.snapshot_download(repo_id=repository, repo_type="model", revision=args.revision,
                                  local_dir=str(downloaded), allow_patterns=list(FILES))  # fmt: skip
        document = _checked(downloaded, accepted, repository)
        os.rename(accepted, target)
    lines, more = [f"{target}: {document['algo']} on {document['env']}"], ""
    if document["import_module"]:
        module = clean(document["import_module"], 200)
        lines.append(f"its environment comes from a module that you must install and trust: {module}")
        more = f" --import {module}"
    run = as_argument(str(target))
    lines += [f"watch it: python -m spreeze play {run}{more}", f"evaluate it: python -m spreeze evaluate {run}{more}"]
    return print_result(args, {"run_dir": str(target), "repository": repository, **document}, "\n".join(lines))


def _checked(downloaded: Path, accepted: Path, repository: str) -> dict[str, Any]:
    """Copies the files of a run to ``accepted``, a new directory, and reads them; returns what the policy is."""
    for file in FILES:
        path = downloaded / file
        if path.is_file() and not path.is_symlink():
            (accepted / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, accepted / file)
    if not (accepted / POLICY).is_file():
        raise RunError(f"{repository} holds no policy of Spreeze: it has no {POLICY}")
    check_format(accepted)
    weights, spec = read_policy(accepted / POLICY)
    record = {"env_id": spec.env_id, "algo": weights.meta.get("algo"), **read_run(accepted), "state": "finished",
             "pulled_from": repository}  # fmt: skip
    kept = {key: value for key, value in record.items() if key not in ("pid", "host", "nonce")}
    write_json(accepted / "run.json", kept)
    final_return = read_json(accepted / "summary.json").get("eval_return_final")
    return {"env": clean(spec.env_id, 100), "algo": clean(record["algo"], 40), "import_module": spec.import_module,
            "return": final_return if isinstance(final_return, float) else None}  # fmt: skip
