"""Merges profiles (TOML), flags and ``--set`` into one checked configuration.

Each value keeps its source (default, profile, tuner, user), also in the ``config.toml`` of a run.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from spreeze.config.algorithms import (
    ALGORITHMS,
    check_algorithm,
    default_algorithm,
    find_network,
    find_row,
    implied_mode,
    rows,
)
from spreeze.config.schema import (
    FLAG_OF,
    SECTIONS,
    SHARED_SECTIONS,
    Config,
    RunConfig,
    active_settings,
    algorithm_section,
    condition_of,
    marked,
)
from spreeze.config.section import Section, literal, not_offered
from spreeze.errors import ConfigError, did_you_mean
from spreeze.types import EnvSpec

SAMPLES_PER_INSERT_BOUNDS = ("samples_per_insert_min", "samples_per_insert_max")
"""Settings of ``replay`` that bound the samples per insert."""
DEFAULT = "default"
"""Source of values that no layer sets."""
USER = "user"
"""Source of values from the command line. No file may give a layer this name: it allows the import of modules."""
SLOW_ENV = "slow environment"
"""Source of settings that depend on the measured time of an env step."""
RESUMED = "resumed run"
"""Source of values from the earlier sessions of a run."""
_LONG_EPISODE_STEPS, _TIME_CONSTANTS = 1000, 3.0
"""Minimum time limit of long episodes, and number of the discount's time constants in one (``assets/figures.md``)."""
_FIRST_UPDATE_S = 20.0
"""Time within which a single sampler should have collected enough for the first update."""
_SMALLER = {"replay": ("learning_starts", (2_000, 1_000, 500, 200)), "rollout": ("size", (1_024, 512, 256))}
"""Setting and smaller values of it; few, so that the noise of measurements seldom changes it."""

Values = dict[str, dict[str, Any]]
"""section -> field -> value."""


@dataclass(frozen=True)
class Layer:
    """Some values and the name of their source."""

    source: str
    values: Values
    about: dict[str, Any] = field(default_factory=dict)
    """Table ``[about]`` of a profile."""
    of_algorithm: dict[str, Values] = field(default_factory=dict)
    """Values of a profile for one algorithm alone."""
    choice: dict[str, Any] | None = None
    """Algorithm, mode and perhaps learners; none applies if another layer sets a different algorithm or mode."""

    def without(self, section: str, name: str) -> Layer:
        """This layer without one setting."""
        fields = {key: value for key, value in self.values.get(section, {}).items() if key != name}
        return dataclasses.replace(self, values=self.values | ({section: fields} if section in self.values else {}))

    def for_algorithm(self, algo: str) -> list[Layer]:
        """This layer's values for all algorithms, and above them its values for this one."""
        common, values = dataclasses.replace(self, of_algorithm={}), self.of_algorithm.get(algo)
        return [common] if values is None else [common, dataclasses.replace(common, values=values, choice=None)]


@dataclass(frozen=True)
class Settings:
    """A checked configuration and the source of each value, keyed ``section.field``."""

    config: Config
    sources: dict[str, str]
    kept: frozenset[str] = frozenset()
    """Settings that ``about.keep`` of a profile protects from the tuner, unless a stronger layer set them."""

    def source_of(self, key: str) -> str:
        return self.sources.get(key, DEFAULT)

    def with_layer(self, layer: Layer) -> Settings:
        base = [
            Layer(self.source_of(f"{p}.{f}"), {p: {f: v}}, {"keep": self.kept & {f"{p}.{f}"}})
            for p, f, v in iterate(self.config)
        ]
        merged = resolve([*base, layer])
        sources = {key: source for key, source in merged.sources.items() if source != DEFAULT}
        return dataclasses.replace(merged, sources=sources)


def iterate(config: Config) -> list[tuple[str, str, Any]]:
    """All (section, field, value) of a configuration, in order."""
    return [
        (name, item.name, getattr(section, item.name))
        for name, section in config.sections().items()
        for item in dataclasses.fields(section)
    ]


def resolve(layers: list[Layer], import_module: str | None = None) -> Settings:
    """Merges layers, weakest first, and checks the result.

    ``import_module`` is the argument of ``--import``, imported if the algorithm is not one of Spreeze's own; None: the
    value of the ``USER`` layer. It never comes from a file. Raises a ConfigError for an unknown section or field (with
    the nearest known one), or a wrong type or range.
    """
    layers = [part for layer in layers for part in (layer, *_choice_layers(layer, layers))]
    known: Mapping[str, type[Section]] = SECTIONS
    algo, source = _strongest(layers, "run", "algo")
    module = import_module or _strongest([layer for layer in layers if layer.source == USER], "env", "import_module")[0]
    if isinstance(algo, str) and algo not in ALGORITHMS:
        try:
            known = ChainMap({algo: algorithm_section(algo, module)}, SECTIONS)  # type: ignore[arg-type]
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None
    if isinstance(algo, str) and _strongest(layers, "run", "mode")[0] is None:
        layers = [*_mode_of(algo, module), *layers]
    merged: Values = {algo: {}} if isinstance(algo, str) else {}
    sources: dict[str, str] = {}
    kept: set[str] = set()
    for layer in layers:
        keep = layer.about.get("keep", ())
        for section, fields in layer.values.items():
            if section not in known:
                raise ConfigError(
                    f"{layer.source}: unknown section '{section}'{did_you_mean(section, known)} "
                    f"(sections: {', '.join(known)})"
                )
            if not isinstance(fields, dict):
                raise ConfigError(f"{layer.source}: {section} = {fields!r}: expected a table of fields")
            names = [item.name for item in dataclasses.fields(known[section])]
            for given, value in fields.items():
                name = _RENAMED.get(f"{section}.{given}", given)
                if name not in names:
                    raise ConfigError(f"{layer.source}: {unknown_setting(section, name, names)}")
                merged.setdefault(section, {})[name] = value
                key = f"{section}.{name}"
                sources[key] = layer.source
                (kept.add if key in keep else kept.discard)(key)
    sections: dict[str, Any] = {}
    for section, fields in merged.items():  # an algorithm's that is not chosen is checked too
        try:
            sections[section] = known[section](**fields)
        except ConfigError as error:
            name = str(error).split(" ", 1)[0].rstrip(":")
            raise ConfigError(f"{sources.get(f'{section}.{name}', 'settings')}: {section}.{error}") from None
    own = sections.get(algo if isinstance(algo, str) else RunConfig.algo)
    shared = {name: section for name, section in sections.items() if name in SHARED_SECTIONS}
    return Settings(config=Config(algo_settings=own, **shared), sources=sources, kept=frozenset(kept))


OTHER_NAMES = {"learning_rate": "lr", "ent_coef": "entropy_coef", "clip_range": "clip", "n_epochs": "epochs"}
"""Names of Stable-Baselines3 for settings of algorithms, and ours."""

_RENAMED = {"dqn.duelling": "dueling", "replay.go_back": "roll_back"}
"""Settings that earlier versions recorded by another name."""


def unknown_setting(section: str, name: str, names: Sequence[str]) -> str:
    """The error for a field that a section does not have, with others that have it; ``names``: those that it has."""
    if name == "recurrent" and section in ALGORITHMS:
        having = [row.name for row in rows().values() if hasattr(row.config, "recurrent")]
        return f"{section}.recurrent: its policy has no memory; use --algo {', '.join(having[:-1])} or {having[-1]}"
    wanted = OTHER_NAMES.get(name, name)
    longer = [f"'{section}.{known}'" for known in names if known == wanted or known.endswith(f"_{wanted}")]
    close = did_you_mean(f"{section}.{name}", [f"{section}.{known}" for known in names])
    elsewhere = [
        part for part, known in SECTIONS.items() if wanted in (item.name for item in dataclasses.fields(known))
    ]
    hint = f"; '{wanted}' is a setting of {', '.join(elsewhere)}" if elsewhere else close
    hint = f"; did you mean {' or '.join(longer)}?" if longer else hint
    return f"unknown setting '{section}.{name}'{hint} (known: {', '.join(names)})"


def _mode_of(algo: str, module: str | None) -> list[Layer]:
    """A layer with the algorithm's own mode, if that differs from the general default."""
    mode = implied_mode(find_row(algo, module))
    return [] if mode == RunConfig.mode else [Layer(f"default of {algo}", {"run": {"mode": mode}})]


def _choice_layers(layer: Layer, layers: list[Layer]) -> list[Layer]:
    """A layer with ``layer.choice``, if that does not contradict the other layers."""
    if layer.choice is None:
        return []
    fits = all(_strongest(layers, "run", name)[0] in (None, layer.choice[name]) for name in ("algo", "mode"))
    return [Layer(layer.source, {"run": layer.choice})] if fits else []


def _strongest(layers: list[Layer], section: str, name: str) -> tuple[Any, str]:
    """The value in the strongest layer that sets it, and that layer's source; None if no layer does."""
    for layer in reversed(layers):
        fields = layer.values.get(section)
        if isinstance(fields, dict) and name in fields:
            return fields[name], layer.source
    return None, ""


class WithAlgorithm(NamedTuple):
    """Layers that name an algorithm, and the settings resolved from them."""

    layers: list[Layer]
    settings: Settings
    reason: str | None
    """Why this algorithm; None where the user has named it."""


def with_algorithm(layers: Sequence[Layer], spec: EnvSpec, step_us: float | None = None) -> WithAlgorithm:
    """Adds, below ``layers``, an algorithm that fits the actions if none is named, and its defaults for the task.

    ``step_us`` is the measured time of an env step [us]; None: unknown. ``tuning.step_us`` comes first.

    PPO and A2C over vectors learn on the CPU, a GPU or not: their networks are small, 64 x 64 units by default, and a
    GPU would wait for its next kernel most of the time. Raises a ConfigError if the algorithm that was named does not
    fit the actions or the mode, or there is no such network.
    """
    layers, reason = list(layers), None
    settings = resolve(layers)
    if "run.algo" not in settings.sources:
        algo, reason = default_algorithm(spec, settings.config.mode if "run.mode" in settings.sources else None)
        layers.insert(0, Layer("action space", {"run": {"algo": algo}}))
        settings = resolve(layers)
    elif source := next((layer.source for layer in layers if _choice_layers(layer, layers)), None):
        run = settings.config.run
        reason = f"algorithm {run.algo} in mode {run.mode}: {source} sets them for this environment; --algo overrides"
    check_algorithm(settings.config.run.algo, spec, settings.config.mode)
    algorithm = settings.config.on_policy or settings.config.algorithm
    find_network(algorithm.network, spec.import_module)
    try:
        algorithm.check_task(spec)
    except ConfigError as error:
        raise ConfigError(f"{settings.config.run.algo}.{error}") from None
    if any(settings.config.run.algo in layer.of_algorithm for layer in layers):
        layers = [part for layer in layers for part in layer.for_algorithm(settings.config.run.algo)]
        settings = resolve(layers)
    row = find_row(settings.config.run.algo, spec.import_module)
    special = {
        **row.defaults,
        **(row.over_vectors if spec.frames is None else row.over_images),
        **(row.for_discrete if spec.choices is not None else {}),
        **(row.over_sequences if getattr(settings.config.algo_settings, "sequence", None) else {}),
        **(_long_discount(row.name, spec) if settings.config.on_policy is not None else _for_goals(settings, spec)),
    }
    # Both bounds or none: one alone could lie beyond the other one, which another layer may set.
    bounds = {f"replay.{name}" for name in SAMPLES_PER_INSERT_BOUNDS}
    already_set = settings.sources.keys() | (bounds if bounds & settings.sources.keys() else set())
    defaults: Values = {}
    for key, value in special.items():
        if key not in already_set:
            section, name = key.split(".")
            defaults.setdefault(section, {})[name] = value
    if defaults:
        layers.insert(0, Layer(default_of(settings), defaults))
        settings = resolve(layers)
    if slow := _for_slow_env(settings, settings.config.tuning.step_us or step_us):
        layers.insert(1 if defaults else 0, Layer(SLOW_ENV, slow))
        settings = resolve(layers)
    if settings.config.learner.device == "auto" and settings.config.on_policy is not None and spec.frames is None:
        on_cpu = Layer(default_of(settings), {"learner": {"device": "cpu"}})
        layers = [on_cpu, *(layer.without("learner", "device") for layer in layers)]  # each sets "auto", or nothing
        settings = resolve(layers)
    return WithAlgorithm(layers, settings, reason)


def _long_discount(algo: str, spec: EnvSpec) -> dict[str, float]:
    """The discount of on-policy algorithms where episodes may be long; its time constant is a third of their limit."""
    limit = spec.max_episode_steps
    if limit is None or limit < _LONG_EPISODE_STEPS or spec.frames is not None:
        return {}
    return {f"{algo}.gamma": round(1.0 - _TIME_CONSTANTS / limit, 8)}


def _for_slow_env(settings: Settings, step_us: float | None) -> Values:
    """Fewer env steps before the first update where a sampler would take long for the default number."""
    section = "replay" if settings.config.on_policy is None else "rollout"
    name, sizes = _SMALLER[section]
    usual = getattr(getattr(settings.config, section), name)
    affordable = math.inf if step_us is None else 1e6 * _FIRST_UPDATE_S / step_us
    smaller = [size for size in sizes if size < usual]
    is_default = settings.source_of(f"{section}.{name}") in (DEFAULT, default_of(settings))
    if usual <= affordable or not smaller or not is_default or settings.config.data_flow.on_device:
        return {}
    return {section: {name: next((size for size in smaller if size <= affordable), smaller[-1])}}


def _for_goals(settings: Settings, spec: EnvSpec) -> dict[str, Any]:
    """Hindsight for sparse rewards of goal tasks, and normalized observations (Andrychowicz et al. 2017).

    Observations may be small: those of FetchReach are centimetres.
    """
    config, replay, values = settings.config, settings.config.replay, dict[str, Any]()
    her, sparse = replay.her, spec.goals is not None and spec.goals.sparse
    possible = getattr(config.algo_settings, "recurrent", "none") == "none" and not config.data_flow.on_device
    fits = (1 + replay.her_goals) * replay.learning_starts <= replay.capacity
    if "replay.her" not in settings.sources and sparse and possible and fits:
        values["replay.her"] = her = "future"
    if her != "off" and spec.vector_dim > spec.mask_dim:
        values["env.normalize_obs"] = True
    return values


def effect_notes(settings: Settings, *, tuned: bool) -> list[str]:
    """A line for each reason why flags have no effect. ``tuned``: True if the tuner chooses the settings left open."""
    config, given = settings.config, {key for key, source in settings.sources.items() if source == USER}
    unread = without_effect(settings)
    of_tuner = [FLAG_OF.get(key, key) for key in marked("tuner") if key in given]
    untuned = [] if tuned else [name for name in of_tuner if name not in unread]
    of_cluster = {"cluster.samplers", "cluster.learners"} & given if config.cluster.address is None else set()
    without_cluster = [FLAG_OF.get(key, key) for key in sorted(of_cluster)]
    combination = f"with --algo {config.run.algo} in --mode {config.run.mode}"
    why = ((unread, combination), (untuned, "without --auto"), (without_cluster, "without --cluster"))
    return [f"no effect {reason}: {', '.join(names)}" for names, reason in why if names]


def without_effect(settings: Settings) -> list[str]:
    """Settings of the command line that the chosen mode and algorithm do not read: the flag, or else ``section.field``.

    Settings of the run, its task, its end and its hosts are not checked.
    """
    config = settings.config
    read = set(active_settings(config))
    # One flag may set fields of several sections; --set sets one of them.
    flags = {FLAG_OF.get(key) for key in read if settings.sources.get(key) == USER}
    unread = (key for key, source in settings.sources.items() if source == USER and key not in read)
    names = (
        FLAG_OF.get(key, key)
        for key in unread
        if (key not in FLAG_OF or FLAG_OF[key] not in flags) and condition_of(key, config) is not not_offered
    )
    return list(dict.fromkeys(names))


def default_of(settings: Settings) -> str:
    """The source of the defaults that are specific to this algorithm."""
    return f"default of {settings.config.run.algo}"


def parse_assignment(text: str) -> Values:
    """Parses ``section.field=value``, where the value is JSON, Python or bare text."""
    key, sep, raw = text.partition("=")
    section, _, name = key.strip().partition(".")
    if not (sep and section and name):
        raise ConfigError(f"--set {text!r}: expected section.field=value, for example sac.gamma=0.98")
    try:
        value = literal(raw)
    except ValueError:
        value = raw.strip()  # a setting that is not a text refuses it
    return {section: {name: value}}


def to_toml(settings: Settings) -> str:
    """The resolved configuration as TOML, each line with the source of its value."""
    lines: list[str] = []
    for section, fields in groupby(iterate(settings.config), key=lambda item: item[0]):
        lines.append(f"[{section}]")
        for _, name, value in fields:
            text = f"# {name} is not set" if value is None else f"{name} = {toml_value(value)}"
            lines.append(f"{text}  # {settings.source_of(f'{section}.{name}')}")
        lines.append("")
    return "\n".join(lines)


def sources_of(text: str) -> dict[str, str]:
    """``section.field`` -> source, from the comments of a text that ``to_toml`` wrote."""
    sources, section = {}, ""
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip("[] ")
            continue
        assignment, mark, source = line.removeprefix("# ").rpartition("  # ")
        if mark:
            name = assignment.split(maxsplit=1)[0] if assignment.strip() else ""
            sources[f"{section}.{name}"] = source.strip()
    return sources


def toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
    if isinstance(value, tuple):
        return "[" + ", ".join(toml_value(entry) for entry in value) + "]"
    return repr(value)


def from_toml(text: str, source: str, import_module: str | None = None) -> Settings:
    """Reads a text of ``to_toml``, without sources; ``import_module`` is that of ``--import``, never of the text."""
    return resolve([Layer(source=source, values=tomllib.loads(text))], import_module)
