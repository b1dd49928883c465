"""Whether the learner's products can be taken in the asked precision here, decided before anything starts.

Weights, optimisers, activations, gradients and all sums stay float32 in every precision; what changes is
how a matrix product rounds its inputs. So no gradient can underflow that float32 holds (bfloat16 and TF32
have float32's range), and no loss is scaled.
"""

from __future__ import annotations

from pathlib import Path

from spreeze.errors import ConfigError

_UNITS = ("amx_bf16", "avx512_bf16")


def bfloat16_unit(root: str | Path = "/") -> str | None:
    """The processor's instructions for bfloat16 products, as the kernel calls them; None without any."""
    try:
        text = (Path(root) / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    flags = next((line.split() for line in text.splitlines() if line.startswith("flags")), [])
    return next((unit for unit in _UNITS if unit in flags), None)


def check_precision(precision: str, *, on_gpu: bool, root: str | Path = "/") -> None:
    """Refuses a precision that the learner's devices do not have.

    Args:
        precision: of the learner's products.
        on_gpu: True where a GPU takes part.
        root: folder that holds ``proc``; another than ``/`` in tests.

    Raises:
        ConfigError: says what would work.
    """
    if precision == "tf32" and not on_gpu:
        raise ConfigError("learner.precision = tf32: products of GPUs; this learner computes on the processor: "
                          "use float32, or bfloat16 where the processor has it")
    if precision == "bfloat16" and on_gpu:
        raise ConfigError("learner.precision = bfloat16: for processors, whose products round float32 inputs; "
                          "a GPU does the same with more digits as tf32: use tf32 or float32")
    if precision == "bfloat16" and bfloat16_unit(root) is None:
        raise ConfigError(f"learner.precision = bfloat16: this processor has none of {', '.join(_UNITS)} and would "
                          "only imitate it; use float32")
