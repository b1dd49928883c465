"""Tries an environment in a child process before anything is started, and times it.

The child (``python -m spreeze.envs.probe``) writes one JSON file; an environment that hangs,
prints from C or takes the process down cannot harm the caller.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spreeze.errors import EnvironmentError_
from spreeze.jsonable import rebuild
from spreeze.processes import held_back, kill_and_wait, leave_to_supervisor
from spreeze.siblings import PROBE, take_name
from spreeze.strays import MARK, end_strays
from spreeze.types import EnvSpec

_TIMING_S = 1.5
_GRACE_S = 5.0
_LOOK_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What a probe found out."""

    spec: EnvSpec
    step_us_median: float | None
    """Median time of one env step with random actions; None if not timed."""
    step_cv: float | None
    """Standard deviation of the step time over its mean; None if not timed."""
    first_reset_s: float
    memory_bytes: int
    """Resident memory that the first environment of a process adds."""


def spec_from_json(values: dict[str, Any]) -> EnvSpec:
    """An ``EnvSpec`` from the JSON of its fields (lists become tuples)."""
    return rebuild(EnvSpec, values)


def probe_env(
    env_id: str,
    import_module: str | None = None,
    *,
    deadline_s: float = 60.0,
    steps: int = 2000,
    log: Path | None = None,
    plain: bool = False,
    args: tuple[str, ...] = (),
    image: dict[str, Any] | None = None,
    interrupted: Callable[[], bool] = lambda: False,
) -> Probe:
    """Describes and times an environment in a child process.

    Args:
        env_id: Gymnasium id.
        import_module: module to import first.
        deadline_s: the child is killed after that time.
        steps: env steps to time (at most 1.5 s); 0 only makes, resets and steps once.
        log: where the child's own output goes; nowhere if None.
        plain: tries a Bullet task as its package has it.
        args: ``key=value`` texts for the environment's constructor.
        image: values of the image part of the configuration; its defaults if None.
        interrupted: asked ten times a second whether to give up.

    Raises:
        EnvironmentError_: it cannot be used, hangs, or took its process down.
        KeyboardInterrupt: ``interrupted`` said so; the child is gone.
    """  # fmt: skip
    found = in_child("time", env_id, import_module, deadline_s=deadline_s, steps=steps, log=log, plain=plain, args=args,
                     image=image, interrupted=interrupted)
    return Probe(**{**found, "spec": spec_from_json(found["spec"])})


def in_child(
    what: str, env_id: str, import_module: str | None = None, *, deadline_s: float = 60.0, steps: int = 0,
    log: Path | None = None, plain: bool = False, args: tuple[str, ...] = (), image: dict[str, Any] | None = None,
    interrupted: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """What the child found out: ``what`` is ``time`` (a probe), ``check`` (a ``Checkup``) or ``draw`` (a picture).

    Raises:
        EnvironmentError_: it cannot be used, hangs, or took its process down.
        KeyboardInterrupt: ``interrupted`` said so; the child is gone.
    """
    with tempfile.TemporaryDirectory(prefix="spreeze-probe-") as folder:
        out = Path(folder) / "probe.json"
        command = [sys.executable, "-m", "spreeze.envs.probe", "--what", what, "--env", env_id, "--out", str(out)]
        command += ["--steps", str(steps), "--deadline", str(deadline_s + _GRACE_S)]
        command += ["--import", import_module] if import_module else []
        command += ["--plain"] if plain else []
        command += [f"--env-arg={text}" for text in args]
        command += ["--image", json.dumps(image)] if image else []
        code = _run(command, deadline_s, log, interrupted)
        if code is None:
            raise EnvironmentError_(f"{env_id}: no environment step within {deadline_s:g} s; the probe was ended")
        try:
            found = json.loads(out.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            if interrupted():
                raise KeyboardInterrupt from None
            raise EnvironmentError_(f"{env_id}: its process ended with {_ending(code)} before the first step") from None
    if "error" in found:
        raise EnvironmentError_(found["error"])
    return dict(found)


def _run(command: list[str], deadline_s: float, log: Path | None, interrupted: Callable[[], bool]) -> int | None:
    """Exit code of the child, or None if it had to be killed (with all that it started)."""
    nonce = secrets.token_hex(8)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": "1",
        MARK: nonce,
    }
    with open(log or os.devnull, "ab") as output, held_back():
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    try:
        end_s = time.monotonic() + deadline_s
        while (left_s := end_s - time.monotonic()) > 0:
            if interrupted():
                raise KeyboardInterrupt
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(min(left_s, _LOOK_S))
        return None
    finally:
        if child.poll() is None:
            kill_and_wait(child)
        end_strays(nonce)


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def measure(
    env_id: str, import_module: str | None, steps: int, plain: bool = False, args: tuple[str, ...] = (),
    image: dict[str, Any] | None = None,
) -> Probe:
    """Makes, checks and times an environment in this process."""
    import numpy as np
    import psutil

    from spreeze.envs.task import make_task, uniform_actions

    process = psutil.Process()
    memory = process.memory_info().rss
    task = make_task(env_id, import_module, plain=plain, args=args, image=image)
    try:
        start = time.perf_counter()
        task.reset(seed=0)
        first_reset_s = time.perf_counter() - start
        actions = task.to_native(uniform_actions(task.spec, max(1, steps), np.random.default_rng(0)))
        times = []
        end = time.perf_counter() + _TIMING_S
        for action in actions:
            before = time.perf_counter()
            _, _, terminated, truncated = task.step(action)
            now = time.perf_counter()
            times.append(1e6 * (now - before))
            if terminated or truncated:
                task.reset()
            if now > end:
                break
        memory = max(0, process.memory_info().rss - memory)
    finally:
        task.close()
    timed = np.array(times[1:]) if steps > 1 and len(times) > 1 else None
    return Probe(
        spec=task.spec,
        step_us_median=None if timed is None else float(np.median(timed)),
        step_cv=None if timed is None else float(timed.std() / timed.mean()),
        first_reset_s=first_reset_s,
        memory_bytes=memory,
    )


def _find_out(args: argparse.Namespace) -> dict[str, Any]:
    given = (args.env, args.import_module)
    if args.what == "time":
        return dataclasses.asdict(measure(*given, args.steps, args.plain, tuple(args.env_arg), args.image))
    from spreeze.envs import checkup

    if args.what == "draw":
        return checkup.draw(*given, args.plain, tuple(args.env_arg))
    return dataclasses.asdict(checkup.check_up(*given, args.plain, tuple(args.env_arg)))


def main(argv: list[str] | None = None) -> int:
    """The child: one environment, one JSON file."""
    parser = argparse.ArgumentParser(prog="spreeze.envs.probe", description="Try an environment; write a JSON file.")
    parser.add_argument("--env", required=True, help="Gymnasium id")
    parser.add_argument("--import", dest="import_module", help="module to import first (default: none)")
    parser.add_argument("--plain", action="store_true", help="a Bullet task as its package has it (default: off)")
    parser.add_argument("--env-arg", action="append", default=[], help="key=value for its constructor (default: none)")
    parser.add_argument("--what", choices=("time", "check", "draw"), default="time", help="what to do (default: time)")
    parser.add_argument("--image", type=json.loads, help="JSON object: how frames are made (default: as usual)")
    parser.add_argument("--out", required=True, type=Path, help="JSON file to write")
    parser.add_argument("--steps", type=int, default=2000, help="env steps to time (default: 2000, at most 1.5 s)")
    parser.add_argument("--deadline", type=float, help="end this process after so many s (default: never)")
    args = parser.parse_args(argv)
    leave_to_supervisor()
    if args.deadline:
        faulthandler.dump_traceback_later(args.deadline, exit=True)  # also when the caller was killed
    try:
        found = _find_out(args)
    except Exception as error:
        text = " ".join(str(error).split())
        if not isinstance(error, EnvironmentError_):
            text = f"{args.env} failed when tried: {type(error).__name__}: {text}"
        found = {"error": text[:1000], "kind": type(error).__name__}
    finally:
        faulthandler.cancel_dump_traceback_later()
    temporary = args.out.with_suffix(".tmp")
    temporary.write_text(json.dumps(found), encoding="utf-8")
    os.replace(temporary, args.out)
    return 2 if "error" in found else 0


if __name__ == "__main__":
    take_name(PROBE)
    sys.exit(main())
