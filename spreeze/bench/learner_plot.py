"""A picture of the learner's bench: rates and share of the product floor over batch sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spreeze.errors import UsageError

_PANELS = (
    ("updates_per_s", "updates/s", True), ("update_frames_per_s", "update frames/s", True),
    ("product_floor_share", "share of one core's product floor", False),
)


def draw_learner(cases: list[dict[str, Any]], machine: str, out: Path) -> None:
    """Draws one line for each kind of learner, with all repeats as a band.

    Args:
        cases: what ``learner_rows`` measured.
        machine: one line about it.
        out: picture to write.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise UsageError("a picture needs matplotlib: pip install matplotlib") from None
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6), constrained_layout=True)
    for label in dict.fromkeys(_label(case) for case in cases):
        lines = sorted((case for case in cases if _label(case) == label), key=lambda case: int(case["batch_size"]))
        sizes = [case["batch_size"] for case in lines]
        for axis, (name, _, _) in zip(axes, _PANELS, strict=True):
            axis.plot(sizes, [case[name] for case in lines], marker="o", markersize=3, linewidth=1.6, label=label)
            repeats = [_repeats(case, name) for case in lines]
            axis.fill_between(sizes, [min(values) for values in repeats], [max(values) for values in repeats],
                              alpha=0.2, linewidth=0)
    for axis, (_, text, logarithmic) in zip(axes, _PANELS, strict=True):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("batch size")
        axis.set_ylabel(text)
        axis.grid(alpha=0.3)
        if logarithmic:
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0.0)
    axes[0].legend(fontsize=8)
    figure.suptitle(f"{cases[0]['algo']}, 2x256 networks, synthetic rows: {machine}", fontsize=10)
    figure.savefig(out, dpi=110)
    pyplot.close(figure)


def _label(case: dict[str, Any]) -> str:
    threads = f"{case['learner_threads']} thread{'s' * (case['learner_threads'] > 1)}, {case['precision']}"
    return f"{threads}, copies every {case['copy_interval']} updates" if case["copy_interval"] else threads


def _repeats(case: dict[str, Any], name: str) -> list[float]:
    if name == "update_frames_per_s":
        return [value * case["batch_size"] for value in case["repeats"]["updates_per_s"]]
    return list(case["repeats"][name])
