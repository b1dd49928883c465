"""Policies with memory: tasks that need it, by counts of env steps, and the time of a step beside a perceptron's."""

import argparse
import time

import numpy as np
from common import compare, main, rows_of, rows_of_target
from figures import Row, row

from spreeze.inference.policy import Policy
from spreeze.inference.recurrence import CELLS

MODULE = "spreeze.envs.small_tasks"
_SIZES = ((1, 64), (8, 64), (32, 64), (8, 128), (8, 256))
"""Environments, and units of each of three layers."""
_SETTINGS = {
    "TMaze-v0": {"lr": 1e-3, "minibatch_size": 256},
    "CartPoleNoVel-v1": {"lr": 1e-3, "minibatch_size": 256},
    "PendulumNoVel-v1": {"lr": 1e-3, "minibatch_size": 256, "gamma": 0.9},
}


def returns(args: argparse.Namespace) -> list[Row]:
    """Final return, and env steps to the target, of an algorithm without and with a cell."""
    algo = args.algo
    settings = [f"--set={algo}.{name}={value}" for name, value in _SETTINGS.get(args.env, {}).items()]
    settings = settings if algo == "ppo" else ["--batch-size=512", "--set=replay.samples_per_insert_max=128"]
    common = ["--import", MODULE, "--env", args.env, "--algo", algo, "--mode", args.mode, "--samplers", "1",
              "--envs-per-sampler", "8", "--env-steps", str(args.env_steps), *settings]  # fmt: skip
    found = compare(args, {kind: [f"--set={algo}.recurrent={kind}"] for kind in ("none", *CELLS)}, common)
    return [
        *rows_of(found, "eval_return_final", "env_steps_per_s", env=args.env),
        *rows_of_target(found, args.target_return, env=args.env),
    ]


def step(args: argparse.Namespace) -> list[Row]:
    """Processor time of a sampler's draw of actions by a cell and two layers, over that of three layers as wide."""
    rows = []
    for envs, units in _SIZES:
        perceptron = _policy("none", units)
        for kind in CELLS:
            policy, found = _policy(kind, units), []
            for _ in range(args.repeats):
                times = [_draw_s(policy, envs, args.seconds), _draw_s(perceptron, envs, args.seconds)]
                found.append(times[0] / times[1])
            rows.append(row("time_over_perceptron", "share", found, target="<= 2", case=kind, envs=envs, units=units))
    return rows


def _policy(kind: str, units: int) -> Policy:
    """A policy over 4 observations with 2 actions, of random weights."""
    rng, obs_dim = np.random.default_rng(0), 4

    def drawn(*shape: int) -> np.ndarray:
        return 0.1 * rng.standard_normal(shape).astype(np.float32)

    hidden, gates = [units] * (3 if kind == "none" else 2), {"lstm": 4, "gru": 3}.get(kind, 0) * units
    arrays = {"obs_mean": drawn(obs_dim), "obs_std": np.ones(obs_dim, np.float32), "head_w": drawn(units, 2),
              "head_b": drawn(2)}  # fmt: skip
    meta = {"policy": "categorical", "nvec": [2], "obs_dim": obs_dim, "hidden_sizes": hidden, "activation": "tanh"}
    for index in range(len(hidden)):
        arrays |= {f"w{index}": drawn(obs_dim if index == 0 and not gates else units, units), f"b{index}": drawn(units)}
    if gates:
        meta |= {"recurrent": kind, "recurrent_size": units}
        arrays |= {"cell_x": drawn(obs_dim, gates), "cell_h": drawn(units, gates)}
        arrays |= {"cell_x_bias": drawn(gates), "cell_h_bias": drawn(gates)}
    return Policy.from_weights(arrays, meta)


def _draw_s(policy: Policy, envs: int, seconds: float, block: int = 100) -> float:
    """Least processor time of a draw for so many environments, of the blocks that fit into ``seconds``."""
    rng = np.random.default_rng(1)
    obs, noise = rng.standard_normal((envs, 4)).astype(np.float32), rng.random((envs, 1), np.float32)
    state, least, end_s = policy.sample(obs, noise)[2], np.inf, time.monotonic() + seconds
    while time.monotonic() < end_s:
        start_s = time.process_time()
        for _ in range(block):
            policy.sample(obs, noise, state)
        least = min(least, (time.process_time() - start_s) / block)
    return least


if __name__ == "__main__":
    main(
        __doc__ or "",
        {"returns": returns, "step": step},
        flags={"env_steps": 200_000, "mode": "serial", "algo": "ppo"},
        env="TMaze-v0",
        target_return=0.95,
        seconds=600.0,
    )
