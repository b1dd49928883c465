"""The hub's library (extra ``hub``), and the files of a run that a repository of the hub holds."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spreeze.cli.evaluate import policy_of, recorded_spec
from spreeze.errors import ConfigError, HubError
from spreeze.formatting import clean
from spreeze.transport.weights import Weights, read_weights
from spreeze.types import EnvSpec

POLICY = "checkpoints/best.safetensors"
CLIP = "replay.mp4"
"""The hub plays a file of this name beside the model's page."""
CURVE = "return.png"
CARD = "README.md"
FILES = (CARD, CURVE, POLICY, "run.json", "config.toml", "summary.json", "eval.csv", CLIP)
"""Everything that is sent, and all that is taken; paths as in the directory of a run."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def check_repository(name: str, flag: str) -> str:
    """The name, if it is one of a repository.

    Raises:
        ConfigError: it is not ``OWNER/NAME``.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{flag} {clean(name, 100)}: expected OWNER/NAME, as the hub has it")
    return name


def read_policy(path: Path) -> tuple[Weights, EnvSpec]:
    """The weights of a policy, and the task that it was trained on.

    Raises:
        WeightsError: it is damaged.
    """
    weights = read_weights(path)
    spec = recorded_spec(weights)
    if "network" not in weights.meta:  # else its module made it
        policy_of(weights, spec)
    return weights, spec


def library() -> Any:
    """The package ``huggingface_hub``.

    Raises:
        ConfigError: it is not installed.
    """
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ConfigError("this needs huggingface_hub: pip install -e '.[hub]' (or pip install huggingface_hub)")
    return importlib.import_module("huggingface_hub")


@contextlib.contextmanager
def hub_errors(doing: str) -> Iterator[None]:
    """Turns what the hub's library raises, which has many bases, into one line.

    Raises:
        HubError: anything was raised.
    """
    try:
        yield
    except Exception as error:
        remedy = "log in with: hf auth login (or set HF_TOKEN), and check name and network"
        raise HubError(f"{doing} failed: {type(error).__name__}: {clean(error, 300)}; {remedy}") from None
