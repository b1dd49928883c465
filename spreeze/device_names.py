"""Devices of a learner by name. Knows no torch, so that what cannot run is refused before anything is loaded."""

from __future__ import annotations

from spreeze.errors import ConfigError


def named_devices(text: str, num_gpus: int, gpu_reason: str | None = None) -> tuple[str, ...]:
    """One device, or the actor's and the critics', each as ``cpu`` or ``cuda:N``.

    Args:
        text: ``auto``, ``cpu``, ``cuda``, ``cuda:N``, ``split``, or two devices as ACTOR+CRITICS.
        num_gpus: that may be used.
        gpu_reason: why there are no more, for the error.

    Raises:
        ConfigError: none of these, or a GPU that is not there.
    """
    if text == "auto":
        return ("cuda:0",) if num_gpus else ("cpu",)
    parts = ("cuda:0", "cuda:1") if text == "split" else tuple(text.split("+"))
    names = tuple("cuda:0" if part == "cuda" else part for part in parts)
    if len(names) > 2 or not all(map(_is_name, names)):
        raise ConfigError(
            f"learner.device = {text}: allowed is auto, cpu, cuda, cuda:N, split, or two as ACTOR+CRITICS"
        )
    if any(name != "cpu" and int(name.removeprefix("cuda:")) >= num_gpus for name in names):
        why = f" ({gpu_reason})" if gpu_reason else ""
        raise ConfigError(f"learner.device = {text}: this machine has {num_gpus} usable GPUs{why}; use --device auto "
                          "or cpu")
    return names


def _is_name(name: str) -> bool:
    index = name.removeprefix("cuda:")
    return name == "cpu" or (name.startswith("cuda:") and index.isascii() and index.isdigit())
