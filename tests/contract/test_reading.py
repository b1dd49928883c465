"""How much one has to open to read one update: the files whose functions it runs through, and their lines."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rollouts import learner, rollout, task

import spreeze.algorithms
from spreeze.algorithms import create
from spreeze.config.algorithm_bases import OnPolicyConfig
from spreeze.config.algorithms import ALGORITHMS
from spreeze.config.schema import SECTIONS
from spreeze.types import RowLayout, TeamSpec

FOLDER = Path(spreeze.algorithms.__file__).parent
LIBRARY = {"fused_mlp", "optimizers"}
"""What stands for torch.nn, autograd and torch.optim: an update is read without opening them, as with those."""
MAX_FILES, MAX_LINES = 4, 500


def told():
    """Algorithm -> files, as the docstring of the package lists them."""
    table = spreeze.algorithms.__doc__.split("=\n", 1)[1].split("\n=", 1)[0]
    rows = [line.split("  ", 1) for line in table.splitlines()]
    return {name: {file.strip() for file in files.split(",")} for name, files in rows}


def followed(update):
    """File -> lines of the functions of ``spreeze.algorithms`` that a call runs, without LIBRARY."""
    seen = set()
    sys.setprofile(lambda frame, event, _: event == "call" and seen.add(frame.f_code))
    try:
        update()
    finally:
        sys.setprofile(None)
    found = {}
    for code in seen:
        path = Path(code.co_filename)
        if FOLDER in path.parents and path.stem not in LIBRARY and not code.co_name.startswith("<"):
            last = max(line for *_, line in code.co_lines() if line)
            found.setdefault(path.stem, set()).update(range(code.co_firstlineno, last + 1))
    return {name: len(lines) for name, lines in found.items()}


def one_update(name):
    if SECTIONS[name.split()[0]].__mro__.count(OnPolicyConfig):
        spec = task()
        made = learner(name, spec, "on-policy")
        batch = rollout(made, spec, np.random.default_rng(0))
        return lambda: made.learn(batch, 0.5)
    algo, _, kind = name.partition(" ")
    actions = 3 if kind or algo in ("dqn", "qmix") else None
    options = {"team": TeamSpec(actions=(3, 3), obs_dim=2, state_dim=0)} if algo == "qmix" else {}
    options |= {"num_continuous": 1} if kind == "hybrid" else {}
    made = create(algo, 4, 2, SECTIONS[algo](), 1, num_actions=actions, **options)
    layout = RowLayout(4, 1 if actions and not options else 2)
    batch = layout.split(torch.rand(8, layout.width), 0.99)  # discrete actions are cut to 0
    return lambda: [made.update(batch) for _ in range(2)]  # TD3 moves its actor at every other one


@pytest.mark.parametrize("name", told())
def test_an_update_is_read_in_the_files_that_the_package_names(name):
    lines = followed(one_update(name))
    assert lines.keys() == told()[name]
    assert len(lines) <= MAX_FILES
    assert sum(lines.values()) <= MAX_LINES, lines


def test_every_algorithm_is_in_the_list():
    names = {name.split()[0] for name in told()}
    assert names == {*ALGORITHMS}
