"""The picture of what ``tests/support/matmul_floor.py --json`` printed, drawn on request.

``SPREEZE_PICTURES=assets SPREEZE_BENCH_ROWS=document.json pytest tests/unit/bench/test_bench_pictures.py`` writes
``learner.png`` from the document that it printed.
"""

import contextlib
import importlib.util
import json
import os
from pathlib import Path

import pytest
from matmul_floor import case_rows, learner_cases

pytestmark = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
PANELS = (
    ("updates_per_s", "updates/s", True),
    ("update_frames_per_s", "update frames/s", True),
    ("matmul_floor_share", "share of one core's matmul floor", False),
)


@contextlib.contextmanager
def picture(out, title, panels, **options):
    """Axes side by side; they are written to ``out`` at the end."""
    from matplotlib import pyplot  # takes a second to import

    pyplot.switch_backend("Agg")
    figure, axes = pyplot.subplots(1, panels, constrained_layout=True, **options)
    yield axes
    figure.suptitle(title, fontsize=10)
    figure.savefig(out, dpi=110)
    pyplot.close(figure)


# --- updates/s over the batch size ---


def draw_learner(rows, out, machine):
    """One line for each kind of learner, with all repeats as a band."""
    title = f"{rows[0]['algo']}, 2x256 networks, synthetic rows: {machine}"
    with picture(out, title, len(PANELS), figsize=(12, 3.6)) as axes:
        for label in dict.fromkeys(map(kind, rows)):
            for axis, (name, _, _) in zip(axes, PANELS, strict=True):
                own = sorted(
                    (row for row in rows if (row["metric"], kind(row)) == (name, label)),
                    key=lambda row: row["batch_size"],
                )
                sizes = [row["batch_size"] for row in own]
                axis.plot(sizes, [row["value"] for row in own], marker="o", markersize=3, linewidth=1.6, label=label)
                repeats = [row["repeats"] or [row["value"]] for row in own]
                axis.fill_between(
                    sizes,
                    [min(values) for values in repeats],
                    [max(values) for values in repeats],
                    alpha=0.2,
                    linewidth=0,
                )
        for axis, (_, text, logarithmic) in zip(axes, PANELS, strict=True):
            axis.set_xscale("log", base=2)
            axis.set(xlabel="batch size", ylabel=text, **{"yscale": "log"} if logarithmic else {"ylim": (0.0, None)})
            axis.grid(alpha=0.3)
        axes[0].legend(fontsize=8)


def kind(row):
    return f"{row['learner_threads']} thread{'s' * (row['learner_threads'] > 1)}, {row['precision']}"


# --- tests ---


def test_a_picture_is_drawn_of_all_batch_sizes_and_threads(tmp_path):
    cases = learner_cases([8, 16], repeats=2, obs_dim=3, action_dim=1, hidden=(16,), threads=(1, 2))
    draw_learner(case_rows(cases), tmp_path / "learner.png", "a machine")
    assert (tmp_path / "learner.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(
    not {"SPREEZE_PICTURES", "SPREEZE_BENCH_ROWS"} <= set(os.environ),
    reason="writes a picture: set SPREEZE_PICTURES and SPREEZE_BENCH_ROWS",
)
def test_a_document_of_a_bench_has_its_picture():
    document = json.loads(Path(os.environ["SPREEZE_BENCH_ROWS"]).read_bytes())
    draw_learner(document["rows"], Path(os.environ["SPREEZE_PICTURES"]) / "learner.png", document["machine"])
