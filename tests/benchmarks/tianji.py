"""TianJi: the controller's choice in the curve over samplers, balance under a foreign load, groups, QMIX."""

import argparse
import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from common import PATIENCE_S, busy_core, compare, linear_rows, main, rows_of, rows_of_target, sleeping, written_report
from figures import Row, row
from whole_runs import time_row

from spreeze.metrics.store import MetricsReader

MODE = ["--mode", "tianji"]
SMALL = [
    "--algo",
    "sac",
    "--batch-size",
    "32",
    "--set",
    "sac.hidden_sizes=[32,32]",
    "--set",
    "replay.capacity=20000",
    "--set",
    "replay.learning_starts=100",
]
GAME = "two_step_game"
MIXERS = {mixer: ["--set", f"qmix.mixer={mixer}"] for mixer in ("qmix", "vdn")}
SETTLED_S, PERIOD_S = 10.0, 20.0


def curve(args: argparse.Namespace) -> list[Row]:
    """Time to the return by number of samplers, and with the number that tuner and governor choose."""
    return _curve(
        args, ["--env", args.env, "--algo", args.algo, "--target-return", str(args.target_return)], args.samplers
    )


def sleeping_samplers(args: argparse.Namespace) -> list[Row]:
    """The same where environments sleep, as if each sampler had a core."""
    return _curve(
        args,
        [*sleeping(args.sleep), *SMALL, "--samples-per-insert", "4:4", "--target-return", "140"],
        (1, 2, 4, 8, 16, 24),
    )


def _curve(args: argparse.Namespace, task: list[str], samplers: tuple[int, ...]) -> list[Row]:
    cases = {str(count): [*MODE, "--samplers", str(count)] for count in samplers} | {"controller": [*MODE, "--auto"]}
    found = compare(args, cases, task)
    return [
        *rows_of(found, "samplers", "env_steps", "updates"),
        *(time_row(documents, case=case) for case, documents in found.items()),
    ]


@contextlib.contextmanager
def load_that_comes_and_goes(core: int) -> Iterator[None]:
    """Another program keeps a core busy in every other period."""
    over = threading.Event()

    def turns() -> None:
        while not over.wait(PERIOD_S):
            with busy_core(core):
                over.wait(PERIOD_S)

    thread = threading.Thread(target=turns, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def balance(args: argparse.Namespace) -> list[Row]:
    """How far consumption over production strays from the serial value under a load that comes and goes."""
    with load_that_comes_and_goes(max(os.sched_getaffinity(0))):
        found = compare(args, {"balance": MODE}, ["--env", args.env, "--algo", args.algo])
    strays = []
    for document in found["balance"]:
        now = MetricsReader(Path(document["run_dir"]) / "metrics.db").series("samples_per_insert_now", max_points=10**5)
        strays.append(
            max(
                (
                    abs(value / document["samples_per_insert_band"][0] - 1.0)
                    for t, value in zip(now.t, now.mean, strict=True)
                    if t - now.t[0] >= SETTLED_S
                ),
                default=None,
            )
        )
    return [*rows_of(found, "samples_per_insert"), row("largest_stray", "share", strays, target="<= 0.05")]


def serial(args: argparse.Namespace) -> list[Row]:
    """Env steps to the return beside mode serial, where each row is drawn as often."""
    found = compare(
        args,
        {"tianji": MODE, "serial": ["--mode", "serial"]},
        ["--env", args.env, "--algo", args.algo, "--target-return", str(args.target_return)],
    )
    return _taken(found, args.target_return)


def _taken(found: dict[str, list[dict]], target: float) -> list[Row]:
    return [*rows_of_target(found, target), *(time_row(documents, case=case) for case, documents in found.items())]


def modes(args: argparse.Namespace) -> list[Row]:
    """Time to the return of PPO and DQN in this mode and in those that were made for them, on CartPole."""
    cases = {
        "tianji ppo": [*MODE, "--algo", "ppo"],
        "hts ppo": ["--mode", "hts", "--algo", "ppo"],
        "impact": ["--mode", "impact", "--algo", "impact"],
        "tianji dqn": [*MODE, "--algo", "dqn"],
        "spreeze dqn": ["--mode", "spreeze", "--algo", "dqn"],
    }
    return _taken(compare(args, cases, ["--env", "CartPole-v1", "--target-return", "475"]), 475.0)


def groups(args: argparse.Namespace) -> list[Row]:
    """Env steps/s by the number of groups whose environments sleep."""
    cases = {str(count): ["--learners", str(count), "--samplers", str(2 * count)] for count in args.groups}
    return linear_rows(
        compare(args, cases, [*sleeping(args.sleep), *SMALL, *MODE, "--samples-per-insert", "4:4"]), "groups"
    )


def collect(args: argparse.Namespace) -> list[Row]:
    """Env steps/s by size of the observation and number of samplers: the paper's Eq. 1 says in proportion."""
    rows = []
    for size in (8, 1_000, 20_000):
        common = [
            *sleeping(args.sleep),
            f"--env-arg=obs_dim={size}",
            "--algo",
            "sac",
            "--batch-size",
            "8",
            "--samples-per-insert",
            "0:8",
            "--set",
            "sac.hidden_sizes=[8]",
            "--set",
            "replay.capacity=2000",
            "--set",
            "replay.learning_starts=100",
        ]
        cases = {str(count): ["--samplers", str(count)] for count in args.samplers}
        rows += [{**one, "obs_bytes": 4 * size} for one in linear_rows(compare(args, cases, common), "samplers")]
    return rows


def game(args: argparse.Namespace) -> list[Row]:
    """The two-step game of the QMIX paper, explored at random: the greedy team gets 8 with QMIX, 7 with VDN."""
    common = [
        "--samplers",
        "1",
        "--env",
        f"parallel:{GAME}",
        "--import",
        GAME,
        "--samples-per-insert",
        "8:8",
        *MODE,
        "--env-steps",
        str(args.game_steps),
        "--set",
        "replay.learning_starts=200",
        "--set",
        "qmix.epsilon_end=1.0",
        "--set",
        "qmix.hidden_sizes=[32]",
        "--set",
        "qmix.lr=0.005",
        "--set",
        "qmix.tau=0.05",
    ]
    return rows_of(compare(args, MIXERS, common, PATIENCE_S), "eval_return_mean")


def qmix(args: argparse.Namespace) -> list[Row]:
    """QMIX and VDN on simple_spread after as many env steps of mode serial, which the machine's speed cannot change."""
    common = ["--env", "mpe2:simple_spread_v3", "--mode", "serial", "--env-steps", str(args.env_steps)]
    found = compare(args, MIXERS, common, PATIENCE_S)
    written_report(args, found, "tianji-qmix")
    return rows_of(found, "eval_return_final", "updates")


if __name__ == "__main__":
    main(
        __doc__ or "",
        {
            "curve": curve,
            "sleeping": sleeping_samplers,
            "balance": balance,
            "serial": serial,
            "modes": modes,
            "groups": groups,
            "collect": collect,
            "game": game,
            "qmix": qmix,
        },
        flags={
            "algo": "sac",
            "samplers": (1, 2, 4, 8),
            "groups": (1, 2, 4),
            "sleep": 0.002,
            "game_steps": 20_000,
            "env_steps": 600_000,
        },
        env="Pendulum-v1",
        target_return=-200.0,
        seconds=90.0,
    )
