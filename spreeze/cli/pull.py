"""``python -m spreeze pull``: a policy from a model hub as the directory of a run, which the other commands take."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spreeze.cli.arguments import Parser, print_result
from spreeze.cli.push import FILES, POLICY, check_repository, hub_errors, library, read_policy
from spreeze.config.schema import check_name
from spreeze.errors import RunError
from spreeze.files import read_json, write_json
from spreeze.formatting import clean
from spreeze.run_directory import check_format, make_runs_dir, read_run


def main(argv: Sequence[str] | None = None) -> int:
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
        lines.append(f"its environment comes from a module that you need to have and to trust: {module}")
        more = f" --import {module}"
    lines += [f"watch it: python -m spreeze play {name}{more}", f"evaluate it: python -m spreeze evaluate {name}{more}"]
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
