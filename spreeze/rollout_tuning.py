"""What the tuner is told of an on-policy run: the knobs of its mode, what is configured, what the user has set."""

from __future__ import annotations

from typing import Any

from spreeze.autotune.rollouts import RolloutKnobs, RolloutSetting
from spreeze.config import Config
from spreeze.errors import ConfigError
from spreeze.settings import Settings


def check_tunable(config: Config) -> None:
    """Refuses a mode in which nothing is to choose.

    Raises:
        ConfigError: PPO or A2C in the serial mode.
    """
    if config.on_policy is not None and config.run.mode != "hts":
        raise ConfigError(f"--auto: {config.run.algo} in --mode {config.run.mode} leaves nothing to choose; "
                          "use --mode hts, or leave --auto out")


def setting_names(config: Config) -> dict[str, str]:
    """Field of ``RolloutSetting`` -> the setting that it is; A2C takes an interval in one update."""
    names = {name: f"rollout.{name}" for name in ("executors", "envs_per_executor", "actors", "sync_interval")}
    return {**names, "minibatches": "ppo.minibatches"} if config.run.algo == "ppo" else names


def configured(config: Config, usable_cores: float) -> RolloutSetting:
    """What a run would take without the tuner."""
    part = config.rollout
    return RolloutSetting(
        executors=part.executors or max(1, int(usable_cores)), envs_per_executor=part.envs_per_executor,
        actors=part.actors, sync_interval=part.sync_interval,
        minibatches=int(getattr(config.on_policy, "minibatches", 1)),
    )


def pins(settings: Settings) -> frozenset[str]:
    """What the user has set; a resumed run keeps everything that its stored interval depends on."""
    names = setting_names(settings.config)
    return frozenset(
        field for field, name in names.items()
        if settings.sources.get(name) == "user" or (settings.sources.get(name) == "resumed run" and field != "actors")
    )


def rollout_knobs(
    settings: Settings, usable_cores: float, memory_bytes: int, *, executor_bytes: int, env_bytes: int,
    learner_bytes: int,
) -> RolloutKnobs:
    """Facts of the machine and of the task, for ``autotune.rollouts.tune_rollouts``."""
    config = settings.config
    return RolloutKnobs(
        cores=usable_cores * (1.0 - config.tuning.leave_free), memory_bytes=memory_bytes,
        executor_bytes=executor_bytes, env_bytes=env_bytes, learner_bytes=learner_bytes,
        configured=configured(config, usable_cores), pins=pins(settings),
    )


def rollout_facts(settings: Settings, usable_cores: float) -> dict[str, Any]:
    """What a kept result depends on besides machine, task and algorithm."""
    found = configured(settings.config, usable_cores)
    return {"mode": settings.config.run.mode, "configured": repr(found), "pins": sorted(pins(settings)),
            "correction": settings.config.rollout.correction}
