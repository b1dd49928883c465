"""Which charts the Live page has: a table. A name that ends in ``/*`` stands for all parts of a series."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from spreeze.dashboard.data import meaning

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
"""Okabe and Ito (2008): told apart with any colour vision."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart: series of one unit; ``scale`` turns stored values into shown ones."""

    key: str
    title: str
    unit: str
    series: tuple[str, ...]
    group: str
    scale: float = 1.0


CHARTS: tuple[Chart, ...] = (
    Chart(key="env", title="Env steps a second", unit="1/s", series=("env_steps_per_s",), group="Speed"),
    Chart(key="updates", title="Updates a second", unit="1/s", series=("updates_per_s",), group="Speed"),
    Chart(key="frames", title="Update frames a second", unit="1/s", series=("update_frames_per_s",), group="Speed"),
    Chart(key="cpu", title="Processor use", unit="%", series=("cpu_use",), group="Machine", scale=100.0),
    Chart(key="memory", title="Memory in use", unit="GiB", series=("memory_used_bytes",), group="Machine",
          scale=2.0**-30),
    Chart(key="gpu", title="GPU use", unit="%", series=("gpu_use/*",), group="Machine", scale=100.0),
    Chart(key="power", title="GPU power", unit="W", series=("gpu_power_w/*",), group="Machine"),
    Chart(key="vram", title="GPU memory in use", unit="GiB", series=("gpu_memory_used_bytes/*",), group="Machine",
          scale=2.0**-30),
    Chart(key="ratio", title="Samples per insert", unit="ratio", series=("samples_per_insert",), group="Balance"),
    Chart(key="lag", title="Policy lag", unit="updates", series=("policy_lag",), group="Balance"),
    Chart(key="age", title="Transition age", unit="env steps", series=("transition_age",), group="Balance"),
    Chart(key="critic", title="Critic loss", unit="loss", series=("critic_loss",), group="Learning"),
    Chart(key="actor", title="Actor loss", unit="loss", series=("actor_loss",), group="Learning"),
    Chart(key="q", title="Mean value", unit="return", series=("q_mean",), group="Learning"),
    Chart(key="alpha", title="Temperature", unit="ratio", series=("alpha",), group="Learning"),
    Chart(key="entropy", title="Entropy", unit="nat", series=("entropy",), group="Learning"),
    Chart(key="policy_loss", title="Policy loss", unit="loss", series=("policy_loss",), group="Learning"),
    Chart(key="value_loss", title="Value loss", unit="loss", series=("value_loss",), group="Learning"),
    Chart(key="variance", title="Explained variance", unit="share", series=("explained_variance",), group="Learning"),
    Chart(key="kl", title="Divergence in an update", unit="nat", series=("approx_kl",), group="Learning"),
    Chart(key="rate", title="Learning rate", unit="1e-4", series=("learning_rate",), group="Learning", scale=1e4),
    Chart(key="clipped", title="Clipped ratios", unit="%", series=("clip_share",), group="Learning", scale=100.0),
    Chart(key="grad", title="Gradient before scaling", unit="norm", series=("grad_norm",), group="Learning"),
    Chart(key="critic_grad", title="Critic's gradient", unit="norm", series=("critic_grad_norm",), group="Learning"),
    Chart(key="actor_grad", title="Actor's gradient", unit="norm", series=("actor_grad_norm",), group="Learning"),
)

SERIES = ("episode_return", *(name for chart in CHARTS for name in chart.series))
"""All series that the Live page may ask for."""


def as_json(lag_unit: str) -> list[dict[str, Any]]:
    """The table with a sentence for each chart, for the page's script.

    Args: ``lag_unit``, which depends on the algorithm: updates, or intervals of those without replay.
    """
    return [
        {**asdict(chart), "unit": lag_unit if chart.key == "lag" else chart.unit,
         "help": " ".join(meaning(name.removesuffix("/*")) for name in chart.series)}
        for chart in CHARTS
    ]


def wanted(names: list[str]) -> list[str]:
    """Those of ``names`` that some chart shows, at most eight parts of each series."""
    found: list[str] = []
    for pattern in SERIES:
        prefix = pattern.removesuffix("*")
        parts = [name for name in names if name == pattern or (prefix != pattern and name.startswith(prefix))]
        found += parts[:8]
    return found
