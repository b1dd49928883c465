"""The README's pictures of what ``bench learner`` and ``bench hts`` measured, drawn on request.

``SPREEZE_PICTURES=assets SPREEZE_BENCH_ROWS=document.json pytest tests/test_bench_pictures.py`` writes ``learner.png``
or ``hts.png`` from the document that the bench wrote with ``--json``.
"""

import contextlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
from test_bench_hts import Ideal, bench

from spreeze.bench import hts
from spreeze.bench.learner import case_rows, learner_cases
from spreeze.envs.synthetic import ENV_ID
from spreeze.metrics.hts_theory import expected_lag, simulated_lag

pyplot = pytest.importorskip("matplotlib.pyplot")
PANELS = (("updates_per_s", "updates/s", True), ("update_frames_per_s", "update frames/s", True),
          ("matmul_floor_share", "share of one core's matmul floor", False))
LOADS = (0.3, 0.5, 0.7, 0.8, 0.9)  # what all actors send over what the learner can take


@contextlib.contextmanager
def picture(out, title, panels, **options):
    """Axes side by side; they are written to ``out`` at the end."""
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
                own = sorted((row for row in rows if (row["metric"], kind(row)) == (name, label)),
                             key=lambda row: row["batch_size"])
                sizes = [row["batch_size"] for row in own]
                axis.plot(sizes, [row["value"] for row in own], marker="o", markersize=3, linewidth=1.6, label=label)
                repeats = [row["repeats"] or [row["value"]] for row in own]
                axis.fill_between(sizes, [min(values) for values in repeats], [max(values) for values in repeats],
                                  alpha=0.2, linewidth=0)
        for axis, (_, text, logarithmic) in zip(axes, PANELS, strict=True):
            axis.set_xscale("log", base=2)
            axis.set(xlabel="batch size", ylabel=text, **{"yscale": "log"} if logarithmic else {"ylim": (0.0, None)})
            axis.grid(alpha=0.3)
        axes[0].legend(fontsize=8)


def kind(row):
    return f"{row['learner_threads']} thread{'s' * (row['learner_threads'] > 1)}, {row['precision']}"


# --- HTS-RL where step times are given ---


def draw_hts(rows, out, machine):
    """Draws the rows of ``steps``, ``learner`` and ``sweep``; a part that was not measured stays empty."""
    title = f"HTS-RL on {ENV_ID}, steps of 2 ms on average: {machine}"
    with picture(out, title, 4, figsize=(17, 4.2), width_ratios=(1.1, 0.8, 1.6, 1.0)) as axes:
        draw_bars(axes[0], rows, "hts_over_step", "over the step-synchronous baseline")
        draw_bars(axes[1], rows, "hts_over_alternating", "learner = rollout: over alternating")
        draw_sweep(axes[2], rows)
        draw_lag(axes[3], rows)


def draw_bars(axis, rows, metric, title):
    """Measured ratios with their range, and the simulated ones beside them."""
    found = [one for one in rows if one["metric"] == metric]
    places = range(len(found))
    values = [one["value"] for one in found]
    below = [one["value"] - min(one["repeats"]) for one in found]
    above = [max(one["repeats"]) - one["value"] for one in found]
    axis.bar([place - 0.2 for place in places], values, 0.4, yerr=[below, above], capsize=3,
             label="measured (range of repeats)")
    axis.bar([place + 0.2 for place in places], [one["simulated"] for one in found], 0.4, label="simulated")
    axis.set_xticks(list(places), [one["law"].replace(" ", "\n") for one in found], fontsize=8)
    axis.axhline(1.0, color="grey", linewidth=0.8)
    axis.set_title(title, fontsize=9)
    axis.set_ylabel("env steps/s, ratio")
    if found:
        axis.set_ylim(top=1.3 * max(*values, *(one["simulated"] for one in found)))  # room for the legend
        axis.legend(fontsize=7, loc="upper left")


def draw_sweep(axis, rows):
    """Time of a step of all environments over the interval, for each number of executors."""
    found = [one for one in rows if one["metric"] == "time_for_a_state"]
    for place, n in enumerate(sorted({one["executors"] for one in found})):
        own = sorted((one for one in found if one["executors"] == n), key=lambda one: int(one["interval"]))
        x = [one["interval"] for one in own]
        for name, style, more in (("value", "o", {"markersize": 4, "label": f"executors: {n}"}),
                                  ("simulated_s", "-", {"linewidth": 1.2}), ("formula_s", ":", {"linewidth": 1.2})):
            axis.plot(x, [1e3 * n * one[name] for one in own], style, color=f"C{place}", **more)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("synchronization interval alpha [env steps]")
    axis.set_ylabel("ms for a step of all environments")
    axis.set_title("exponential steps: measured (dots), simulated with overhead (lines), Claim 1 (dotted)", fontsize=9)
    axis.grid(alpha=0.3)
    if found:
        axis.legend(fontsize=7)


def draw_lag(axis, rows):
    """Age of data that waits in a queue, by formula and simulation, and what HTS-RL measured in its place."""
    loads = np.linspace(0.05, 0.92, 60)
    axis.plot(loads, [expected_lag(1, load, 1.0) for load in loads], ":", color="C0", label="with a queue: Claim 2")
    rng = np.random.default_rng(1)
    axis.plot(LOADS, [simulated_lag(rng, 8, load / 8, 1.0) for load in LOADS], "o", color="C0", markersize=4,
              label="with a queue: simulated, 8 actors")
    lags = [lag for one in rows if one["metric"] == "policy_lag" for lag in one["repeats"]]
    if lags:
        axis.fill_between((0.0, 1.0), min(lags) - 0.04, max(lags) + 0.04, color="C1",
                          label=f"HTS-RL: measured in {len(lags)} runs")
    axis.set_xlim(0.0, 1.0)
    axis.set_xlabel("what is collected over what the learner can take")
    axis.set_ylabel("updates between collecting and learning")
    axis.set_title("how old data is", fontsize=9)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)


# --- tests ---


def test_the_picture_of_hts_is_drawn_from_rows_or_from_none(tmp_path):
    rows = hts.steps_rows(bench(Ideal(), laws=("constant", "gamma 1")))
    rows += hts.sweep_rows(bench(Ideal()), intervals=(4, 64), executors=(2,))
    draw_hts(rows, tmp_path / "some.png", "a machine")
    draw_hts([], tmp_path / "none.png", "a machine")
    assert (tmp_path / "some.png").stat().st_size > (tmp_path / "none.png").stat().st_size > 5000


def test_a_picture_is_drawn_of_all_batch_sizes_and_threads(tmp_path):
    cases = learner_cases([8, 16], repeats=2, obs_dim=3, action_dim=1, hidden=(16,), threads=(1, 2))
    draw_learner(case_rows(cases), tmp_path / "learner.png", "a machine")
    assert (tmp_path / "learner.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(not {"SPREEZE_PICTURES", "SPREEZE_BENCH_ROWS"} <= set(os.environ),
                    reason="writes a picture: set SPREEZE_PICTURES and SPREEZE_BENCH_ROWS")
def test_a_document_of_a_bench_has_its_picture():
    document = json.loads(Path(os.environ["SPREEZE_BENCH_ROWS"]).read_bytes())
    draw = {"learner": draw_learner, "hts": draw_hts}[document["bench"]]
    draw(document["rows"], Path(os.environ["SPREEZE_PICTURES"]) / f"{document['bench']}.png", document["machine"])
