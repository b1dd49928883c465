"""The page of a model on the hub: returns beside the published one, their curve, settings, versions, how to use it."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from spreeze.files import read_json
from spreeze.formatting import DASH, clean
from spreeze.metrics.html_report import ticks
from spreeze.metrics.published_returns import SOURCE, Published, published
from spreeze.run_directory import best_record, read_run

CLIP = "replay.mp4"  # the hub plays a file of this name beside the model's page
CURVE = "return.png"
_WIDTH, _HEIGHT = 800, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 20, 30, 40
_INK, _GRID, _LINE, _OTHERS = "#333333", "#e0e0e0", "#1f6fb4", "#c44e00"


def card(run: Path, name: str, points: Sequence[tuple[int, float]], *, clip: bool) -> str:
    """Markdown, with the metadata that the hub reads at its head.

    Args:
        run: the run's directory.
        name: ``OWNER/NAME`` of the repository.
        points: env steps and mean return of each evaluation; ``curve`` draws them.
        clip: whether the repository has a clip.
    """
    record, summary, best = read_run(run), read_json(run / "summary.json"), best_record(run)
    env, algo = clean(record.get("env_id"), 100), clean(record.get("algo"), 40)
    reference = published(env)
    returns = [
        ("this policy", _with_spread(best.get("return"), best.get("std")), f"{_number(best.get('played'))} episodes"),
        ("end of the run", _number(summary.get("eval_return_final")), "mean of the last ten evaluations"),
    ]
    if reference:
        what = f"best published, {reference.algo} on {reference.env_id}, {reference.env_steps:,} env steps"
        returns.append((what, _number(reference.value), SOURCE))
    short = name.rpartition("/")[2]
    return "\n".join(
        [
            *_metadata(env, algo, best),
            "",
            f"# {algo.upper()} on {env}",
            "",
            "Trained with [Spreeze](https://arxiv.org/abs/2312.06126), the reinforcement-learning trainer that tunes "
            "itself to the machine.",
            "",
            *_table(("return", "value", "of"), returns),
            "",
            "This policy was chosen among those of the run by its evaluations, and was then tested on more episodes. "
            "Returns are those of greedy actions.",
            *(["", f"![returns by env steps]({CURVE})"] if points else []),
            *(["", f'<video src="{CLIP}" controls autoplay loop muted></video>'] if clip else []),
            "",
            "## Use it",
            "",
            f"```bash\nspreeze pull {name}\nspreeze play {short}\nspreeze evaluate {short} --episodes 100\n```",
            "",
            f'```python\nfrom spreeze import load_policy\n\npolicy = load_policy("{short}")\n```',
            "",
            "## How it was trained",
            "",
            *_table(("what", "value"), _facts(record, summary)),
            "",
            "Settings that differ from the defaults; `config.toml` has all of them, with their sources:",
            "",
            f"```toml\n{changed((run / 'config.toml').read_text(encoding='utf-8', errors='replace'))}```",
            "",
        ]
    )


def _metadata(env: str, algo: str, best: Mapping[str, Any]) -> list[str]:
    """The head of the page; a JSON string is one of YAML, too."""
    metric = {"type": "mean_reward", "value": _with_spread(best.get("return"), best.get("std")), "name": "mean_reward",
              "verified": False}  # fmt: skip
    result = {
        "task": {"type": "reinforcement-learning", "name": "reinforcement-learning"},
        "dataset": {"name": env, "type": env},
        "metrics": [metric],
    }
    return [
        "---",
        "library_name: spreeze",
        "pipeline_tag: reinforcement-learning",
        f"tags: {json.dumps(['reinforcement-learning', 'deep-reinforcement-learning', 'spreeze', env, algo])}",
        f"model-index: {json.dumps([{'name': algo, 'results': [result]}])}",
        "---",
    ]


def _facts(record: Mapping[str, Any], summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    versions = record.get("versions") or {}
    return [
        ("algorithm, mode, seed", f"{record.get('algo')}, {record.get('mode')}, {record.get('seed')}"),
        ("env steps, updates", f"{_number(summary.get('env_steps'))}, {_number(summary.get('updates'))}"),
        ("time", f"{_number(summary.get('wall_s'))} s"),
        ("machine", clean(record.get("machine"), 200)),
        ("versions", ", ".join(f"{name} {value}" for name, value in versions.items() if value)),
    ]


LOCAL_SETTINGS = ("runs_dir", "demonstrations", "classes", "address")
"""Directories, files, scripts and addresses of this machine, by their names in ``config.toml``: none is shared."""


def changed(config: str) -> str:
    """Lines of a ``config.toml`` whose values are not the defaults, below their sections."""
    kept: list[str] = []
    for part in re.split(r"(?m)^(?=\[)", config):
        head, *lines = part.splitlines() or [""]
        lines = [line for line in lines if line and line[0] != "#" and line.partition(" = ")[0] not in LOCAL_SETTINGS]
        wanted = [line for line in lines if not line.endswith("# default")]
        kept += [head, *wanted] if wanted else []
    return "".join(f"{clean(line, 300)}\n" for line in kept)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [[clean(cell, 400).replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *cells)]


def _number(value: object) -> str:
    if not isinstance(value, int | float) or not math.isfinite(value):
        return DASH
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _with_spread(mean: object, std: object) -> str:
    return f"{mean:.2f} +/- {std:.2f}" if isinstance(mean, float) and isinstance(std, float) else DASH


def curve(points: Sequence[tuple[int, float]], reference: Published | None) -> bytes:
    """A PNG of (env steps, return) of evaluations, one at least, with a dashed line at the published return."""
    image = Image.new("RGB", (_WIDTH, _HEIGHT), "white")
    pen, font = ImageDraw.Draw(image), ImageFont.load_default()
    values = [value for _, value in points] + ([reference.value] if reference else [])
    low, high, last = min(values), max(values), max(1, *(x for x, _ in points))
    high = high if high > low else low + 1.0

    def pixel(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + x / last * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - (y - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM),
        )

    for tick in ticks(low, high):
        pen.line([pixel(0, tick), pixel(last, tick)], fill=_GRID)
        pen.text((_LEFT - 8, pixel(0, tick)[1]), f"{tick:g}", fill=_INK, font=font, anchor="rm")
    for tick in ticks(0.0, float(last)):
        pen.text((pixel(tick, low)[0], _HEIGHT - _BOTTOM + 8), f"{tick:,.0f}", fill=_INK, font=font, anchor="ma")
    pen.text((_WIDTH / 2, _HEIGHT - 6), "env steps", fill=_INK, font=font, anchor="md")
    pen.text((_LEFT, 8), "return of evaluations", fill=_INK, font=font)
    if reference:
        for start in range(0, 100, 2):
            ends = [pixel(last * share / 100, reference.value) for share in (start, start + 1)]
            pen.line(ends, fill=_OTHERS, width=2)
        pen.text((_WIDTH - _RIGHT, 8), reference.label, fill=_OTHERS, font=font, anchor="ra")
    line = [pixel(*point) for point in points]
    pen.line(line if len(line) > 1 else line * 2, fill=_LINE, width=2)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
