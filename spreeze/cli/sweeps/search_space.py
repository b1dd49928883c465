"""Spaces of ``sweep --search``: what each searched setting may be, as typed or around the value that a run would have.

``--set KEY`` searches around that value, ``KEY=LOW:HIGH`` a range, ``KEY=A,B`` choices; ``KEY=VALUE`` is fixed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spreeze.config.schema import Config, field_of, kind_of
from spreeze.config.values import literal_or_text, split_values
from spreeze.errors import ConfigError

if TYPE_CHECKING:
    import optuna

_USUAL = ("actor_lr", "critic_lr", "alpha_lr", "lr", "gamma", "tau", "gae_lambda", "clip", "entropy_coef")
"""Settings of an algorithm that are searched where none is named."""
_FACTOR, _WHOLE_FACTOR = 10.0, 4
"""A range reaches from a value divided by it to that value times it."""
_DECADE = 10.0
"""Ratio of the ends of a range from which it is searched by its logarithm."""


@dataclass(frozen=True)
class Axis:
    """One searched setting: a range, or choices."""

    key: str
    low: float = 0.0
    high: float = 0.0
    whole: bool = False
    """Only integers."""
    choices: tuple[str, ...] = ()

    @property
    def complement(self) -> bool:
        """True if 1 - value is searched: for a discount 0.99 is as far from 0.9 as from 0.999."""
        return not self.choices and 0.5 <= self.low < self.high < 1.0 and 1.0 - self.low >= _DECADE * (1.0 - self.high)

    @property
    def label(self) -> str:
        """Name of the searched parameter."""
        return f"1 - {self.key}" if self.complement else self.key

    @property
    def _bounds(self) -> tuple[float, float]:
        return (1.0 - self.high, 1.0 - self.low) if self.complement else (self.low, self.high)

    @property
    def by_logarithm(self) -> bool:
        low, high = self._bounds
        return not self.choices and low > 0.0 and high >= _DECADE * low * (1.0 - 1e-9)

    def ask(self, trial: optuna.trial.Trial) -> str:
        """``section.field=value`` with the value that the sampler proposes."""
        if self.choices:
            return f"{self.key}={trial.suggest_categorical(self.key, self.choices)}"
        low, high = self._bounds
        if self.whole:
            return f"{self.key}={trial.suggest_int(self.label, int(low), int(high), log=self.by_logarithm)}"
        found = trial.suggest_float(self.label, low, high, log=self.by_logarithm)
        return f"{self.key}={1.0 - found if self.complement else found:.6g}"

    def parameter(self, value: Any) -> Any:
        """The searched parameter at a value of the setting; None where that is not in the space."""
        if self.choices:
            alike = (text for text in self.choices if _same(literal_or_text(text), value))
            return next(alike, None)
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.low <= value <= self.high:
            return None
        return 1.0 - value if self.complement else value


def _same(chosen: Any, value: Any) -> bool:
    return bool((tuple(chosen) if isinstance(chosen, list) else chosen) == value)


def is_fixed(text: str) -> bool:
    """True for ``KEY=VALUE``, which is no axis."""
    _, given, raw = text.partition("=")
    return bool(given) and _ends(raw) is None and len(split_values(raw)) == 1


def space(texts: Sequence[str], config: Config) -> tuple[list[Axis], list[str]]:
    """The axes of ``--set`` texts, and the assignments that are fixed; the usual settings where no text has an axis.

    ``config`` is that of a run without the searched settings.

    Raises:
        ConfigError: an unknown setting, one that occurs twice, or a range that is empty or beyond the allowed one.
    """
    axes: list[Axis] = []
    fixed: list[str] = []
    for text in texts:
        key, given, raw = (word.strip() for word in text.partition("="))
        values = split_values(raw)
        if is_fixed(text):
            fixed.append(text)
        elif not given:
            axes.append(_around(key, config))
        elif (ends := _ends(raw)) is not None:
            axes.append(_range(key, *ends, config))
        else:
            if not all(values) or len(set(values)) < len(values):
                raise ConfigError(f"--set {text!r}: a value is empty or occurs twice")
            axes.append(Axis(key, choices=tuple(values)))
    keys = [axis.key for axis in axes] + [text.partition("=")[0].strip() for text in fixed]
    if twice := [key for key in dict.fromkeys(keys) if keys.count(key) > 1]:
        raise ConfigError(f"--set {twice[0]}: set twice; give it once")
    return axes or [_around(key, config) for key in _usual(config) if key not in keys], fixed


def _usual(config: Config) -> list[str]:
    algo = config.run.algo
    own = config.sections()[algo]
    found = [f"{algo}.{name}" for name in _USUAL if 0.0 < getattr(own, name, 0.0) < 1.0]
    return found + (["learner.batch_size"] if config.on_policy is None else [])


def _field(key: str, config: Config) -> tuple[Any, type, Any]:
    """Declaration, type and present value of a setting."""
    section, _, name = key.partition(".")
    try:
        return field_of(key, config), kind_of(key, config), getattr(config.sections()[section], name)
    except (KeyError, ValueError, AttributeError):
        raise ConfigError(
            f"--set {key}: no such setting of a run with {config.run.algo}; write section.field, such as sac.gamma"
        ) from None


def _around(key: str, config: Config) -> Axis:
    item, kind, value = _field(key, config)
    if kind is bool:
        return Axis(key, choices=("false", "true"))
    if choices := item.metadata["choices"]:
        return Axis(key, choices=tuple(choices))
    least, most = item.metadata["low"], item.metadata["high"]
    if kind not in (int, float) or not value or value < 0.0:
        raise ConfigError(f"--set {key}: it is {value!r}, around which there is no range; type {key}=LOW:HIGH or A,B")
    if kind is int:
        return _range(
            key, max(least or 1, value // _WHOLE_FACTOR, 1), min(most or math.inf, value * _WHOLE_FACTOR), config
        )
    if 0.5 < value < 1.0 and most is not None and most <= 1.0:
        left = 1.0 - value
        return _range(key, 1.0 - min(0.5, left * _FACTOR), 1.0 - left / _FACTOR, config)
    low, high = value / _FACTOR, value * _FACTOR
    return _range(key, max(low, least or 0.0), high if most is None else min(high, most), config)


def _ends(text: str) -> tuple[float, float] | None:
    """Both ends of ``LOW:HIGH``; None for any other text."""
    low, _, high = text.partition(":")
    try:
        return float(low), float(high)
    except ValueError:
        return None


def _range(key: str, low: float, high: float, config: Config) -> Axis:
    item, kind, _ = _field(key, config)
    least, most = item.metadata["low"], item.metadata["high"]
    if kind not in (int, float):
        raise ConfigError(f"--set {key}: it is no number; give its choices, as {key}=A,B")
    if not low < high or (least is not None and low < least) or (most is not None and high > most):
        allowed = f"{'-inf' if least is None else f'{least:g}'} to {'inf' if most is None else f'{most:g}'}"
        raise ConfigError(f"--set {key}={low:g}:{high:g}: expected LOW:HIGH with LOW below HIGH, within {allowed}")
    return Axis(key, low, high, whole=kind is int)
