"""Devices of a learner by name. Knows no torch, so that what cannot run is rejected before anything is loaded."""
from __future__ import annotations

from pathlib import Path

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


_UNITS = ("amx_bf16", "avx512_bf16")


def bfloat16_unit(root: str | Path = "/") -> str | None:
    """The processor's instructions for bfloat16 matmuls, as the kernel calls them; None without any."""
    try:
        text = (Path(root) / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    flags = next((line.split() for line in text.splitlines() if line.startswith("flags")), [])
    return next((unit for unit in _UNITS if unit in flags), None)


def check_precision(precision: str, *, on_gpu: bool, root: str | Path = "/") -> None:
    """Rejects a precision that the learner's devices do not have.

    Args:
        precision: of the learner's matmuls.
        on_gpu: True where a GPU takes part.
        root: folder that holds ``proc``; another than ``/`` in tests.

    Raises:
        ConfigError: says what would work.
    """
    if precision == "tf32" and not on_gpu:
        raise ConfigError("learner.precision = tf32: for matmuls on GPUs; this learner computes on the processor: "
                          "use float32, or bfloat16 where the processor has it")
    if precision == "bfloat16" and on_gpu:
        raise ConfigError("learner.precision = bfloat16: for processors, whose matmuls round float32 inputs; "
                          "a GPU does the same with more digits as tf32: use tf32 or float32")
    if precision == "bfloat16" and bfloat16_unit(root) is None:
        raise ConfigError(f"learner.precision = bfloat16: this processor has none of {', '.join(_UNITS)} and would "
                          "only imitate it; use float32")
