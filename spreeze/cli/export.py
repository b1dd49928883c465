"""``python -m spreeze export``: a run's policy as one file that needs no Spreeze, or its metrics as CSV."""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import importlib.util
import io
import json
import keyword
import os
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spreeze import __version__, files
from spreeze.cli.arguments import Parser, check_output, print_result
from spreeze.cli.evaluate import find_weights, pretrained_policies, read_policy, run_or_policy
from spreeze.cli.runs import TABLES, metric_rows
from spreeze.envs.families import FAMILIES, as_single
from spreeze.envs.make import BULLET_IDS, BULLET_MODULE, OWN_IDS, parse_args
from spreeze.envs.obs_flattening import flags_of, options_of
from spreeze.envs.task import ActionScaling
from spreeze.errors import ConfigError, RunError, did_you_mean
from spreeze.inference import agreement, c_source, policy_formats
from spreeze.inference.policy import Policy
from spreeze.inference.user_modules import is_script, is_within
from spreeze.metrics.store import EvaluationRow, MetricsReader
from spreeze.run_directory import find_run
from spreeze.transport.weights import Weights
from spreeze.types import POLICY_FORMATS, ActionPart, Choices, EnvSpec, FrameSpec, PictureSpec, PolicyFormat, nested

OBSERVATIONS = 1000  # number of observations that the check compares
_CSV = "csv"


def main(argv: Sequence[str] | None = None) -> int:
    names = [*(row.name for row in POLICY_FORMATS), _CSV]
    parser = Parser(
        prog="python -m spreeze export",
        description="Write the greedy policy of a run as a file that runs "
        "without Spreeze, including normalization and action scaling, and a short program that uses it. The "
        f"file is checked against our own policy on {OBSERVATIONS:,} observations. csv writes metrics and "
        "evaluations instead.",
    )
    parser.add_argument("run", metavar="RUN", help=run_or_policy())
    parser.flag("--format", text="output format", default=names[0], metavar="|".join(names))
    parser.add_checkpoint()
    text = "output file"
    parser.flag("--out", text=text, shown="the name of the run, in the working directory", metavar="FILE")
    parser.flag("--force", text="overwrite existing files", default=False)
    parser.add_common_flags()
    return parser.run(argv, lambda args: _export(args, names))


def _export(args: argparse.Namespace, names: list[str]) -> int:
    if args.format not in names:
        raise ConfigError(
            f"--format {args.format}: no such format{did_you_mean(args.format, names)} (formats: {', '.join(names)})"
        )
    row = next((row for row in POLICY_FORMATS if row.name == args.format), None)
    return print_result(args, *(_write_csv(args) if row is None else _write_policy(args, row)))


def _write_policy(args: argparse.Namespace, row: PolicyFormat) -> tuple[dict[str, Any], str]:
    """Writes and checks the file and its example; returns the result as a document and as text."""
    path = find_weights(args.run, Path(args.runs_dir), args.checkpoint)
    weights, spec = read_policy(path)
    is_file = args.run.endswith(".safetensors") or path == pretrained_policies().get(args.run)
    name = path.stem if is_file else find_run(args.run, Path(args.runs_dir)).name
    out = Path(args.out or f"{name}{'' if row.exact else '_int8'}{row.suffix}")
    in_c = row.suffix == ".h"
    program = out.with_name(f"{out.stem}_{row.name}_example.{'c' if in_c else 'py'}")
    _check_paths([out, program], force=args.force)
    missing = [package for package in row.packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(f"--format {row.name} needs {' and '.join(missing)}: pip install 'spreeze[export]'")
    steps = policy_formats.operations(weights.arrays, weights.meta, spec)
    state_dim = policy_formats.state_dim(steps)
    code = c_example(spec, out.name, state_dim) if in_c else example(spec, row, out.name, state_dim)
    about = _about(weights, spec, name) | ({"name": out.stem} if in_c else {})
    data = policy_formats.encode(row.name, steps, spec, about)
    with _replaced_at_end([out, program]) as (temporary, temporary_program):
        files.write_bytes(temporary, data)
        check = None
        if not in_c or c_source.compiler() is not None:
            check = _compared(policy_formats.open_policy(row.name, temporary), steps, weights, spec, exact=row.exact)
        files.write_bytes(temporary_program, code.encode())
    checked = dict.fromkeys(agreement.Agreement._fields) if check is None else check._asdict()
    document: dict[str, Any] = {"file": str(out), "example": str(program), "format": row.name}
    document |= {"weights": str(weights.path), "env": spec.env_id, "bytes": len(data), **checked}
    text = f"{out}: {len(data):,} bytes, {len(steps)} operations, from {weights.path}\n{_check_text(check, spec)}"
    if weights.meta.get("updates") == 0:
        text = f"{text}\nthese weights have had no update: nothing was learned yet"
    does = "calls" if in_c else "plays"
    return document, f"{text}\n{program}: a program that {does} it without Spreeze:\n\n{code}"


def _compared(
    act: policy_formats.Act, steps: list[policy_formats.Operation], weights: Weights, spec: EnvSpec, *, exact: bool
) -> agreement.Agreement:
    obs, state = (
        policy_formats.draw_obs(spec, weights.arrays, OBSERVATIONS, seed=0),
        policy_formats.draw_state(steps, OBSERVATIONS, 1),
    )
    drawn, after = Policy.from_weights(weights.arrays, weights.meta).act(obs, state)
    actions = ActionScaling(spec)(drawn)
    if isinstance(spec.action, Choices):
        actions = spec.action.to_env(actions)
    return agreement.check(act, steps, actions, obs, spec, state, after, exact=exact)


def _check_text(check: agreement.Agreement | None, spec: EnvSpec) -> str:
    if check is None:
        return f"not checked: there is no C compiler ({', '.join(c_source.COMPILERS)}) here"
    beside = f"checked beside our policy on {check.observations:,} observations"
    numbers = f"actions differ by at most {check.difference:.1e} of half their range, {check.mean:.1e} on average"
    if spec.choices is None:
        return f"{beside}: {numbers}"
    ties = f" ({check.ties} left out, where two actions are equally good up to rounding)" if check.ties else ""
    if spec.box is not None:
        same = f"other choices for {check.wrong}" if check.wrong else "the same choices for each"
        return f"{beside}: {same}{ties}; numbers of {numbers}"
    return f"{beside}: {f'another action for {check.wrong}' if check.wrong else 'the same action for each'}{ties}"


def _about(weights: Weights, spec: EnvSpec, name: str) -> dict[str, Any]:
    return {
        "spreeze": __version__,
        "run": name,
        "env": spec.env_id,
        **{key: weights.meta.get(key) for key in ("algo", "updates", "env_steps")},
        **({"observation": "; ".join(spec.obs_layout)} if spec.obs_layout else {}),
    }


def _check_paths(paths: list[Path], *, force: bool) -> None:
    for path in paths:
        check_output(str(path))
        if path.exists() and not force:
            raise RunError(f"{path} exists: choose another --out, or overwrite it with --force")


@contextlib.contextmanager
def _replaced_at_end(paths: list[Path]) -> Any:
    """Yields a temporary path for each of ``paths``, which get their names at the end; a RunError if that fails."""
    temporary = [path.with_name(files.temp_name() + path.suffix) for path in paths]
    try:
        yield temporary
        for before, path in zip(temporary, paths, strict=True):
            os.replace(before, path)
    except OSError as error:
        raise RunError(f"cannot write {paths[0]}: {error.strerror or error}") from None
    finally:
        for path in temporary:
            with contextlib.suppress(OSError):
                path.unlink()


def _write_csv(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    run = find_run(args.run, Path(args.runs_dir))
    out = Path(args.out or f"{run.name}.csv")
    evaluations = out.with_name(f"{out.stem}_evaluations.csv")
    _check_paths([out, evaluations], force=args.force)
    reader = MetricsReader(run / "metrics.db")
    metrics: list[Sequence[object]] = [TABLES["metrics"], *metric_rows(reader)]
    evaluated: list[Sequence[object]] = [EvaluationRow._fields, *reader.evaluations()]
    with _replaced_at_end([out, evaluations]) as temporary:
        for path, rows in zip(temporary, (metrics, evaluated), strict=True):
            buffer = io.StringIO()
            csv.writer(buffer, lineterminator="\n").writerows(rows)
            files.write_bytes(path, buffer.getvalue().encode())
    counts = {"points": len(metrics) - 1, "evaluations": len(evaluated) - 1}
    text = (
        f"{out}: {counts['points']:,} points, one a line (older than an hour: means of 10 s, older than a day: of "
        f"60 s)\n{evaluations}: {counts['evaluations']:,} evaluations"
    )
    return {"file": str(out), "evaluations_file": str(evaluations), "format": _CSV, **counts}, text


def example(spec: EnvSpec, row: PolicyFormat, file_name: str, state_dim: int = 0) -> str:
    """A program that plays the exported file with Gymnasium and the file's own engine only.

    ``state_dim`` is the length of the policy's state; 0 without memory. A ConfigError for an invalid name of a module.
    """
    prefix, _, plain_id = spec.env_id.rpartition(":")
    family = FAMILIES.get(prefix)
    packages = dict.fromkeys(("gymnasium", "numpy", row.runs_on, "" if family is None else family.package))
    needs = filter(None, packages)
    lines = [
        f"# Plays {spec.env_id!r} with a policy that Spreeze trained; needs: pip install {' '.join(needs)}",
        *(["import functools"] if spec.frames is not None else []),
        "from pathlib import Path",
        "",
        "import gymnasium",
        "import numpy as np",
    ]
    lines += [f"import {row.runs_on}"] if row.runs_on != "numpy" else []
    lines += _module_lines(spec, plain_id)
    if family is not None and not family.team:
        lines.append(f"# Trained in vector environments of {prefix!r}; here one plain environment of the same id.")
    runner = policy_formats.runner_source(with_state=state_dim > 0).splitlines()
    lines += [
        "",
        *(["", *runner, "", ""] if row.name == "numpy" else []),
        f"file = Path(__file__).with_name({file_name!r})",
        row.open,
    ]
    functions = _obs_lines(spec)
    lines += [_make_line(spec, plain_id), *functions, *([""] if functions else []), "", *_loop(spec, row, state_dim)]
    return "\n".join(lines) + "\n"


def c_example(spec: EnvSpec, file_name: str, state_dim: int) -> str:
    """A C program that acts three times on an observation of zeros."""
    name = c_source.c_name(Path(file_name).stem)
    big = name.upper()
    layout = c_source.comment("; ".join(spec.obs_layout) or spec.env_id)
    memory = f"static float state[{big}_STATE]; /* zeros where an episode begins */\n            " if state_dim else ""
    return textwrap.dedent(f"""\
        /* cc -O3 -o policy THIS_FILE -lm && ./policy */
        #include <stdio.h>
        #include {json.dumps(file_name)}

        int main(void) {{
            static {"uint8_t" if spec.frames and spec.frames.is_single else "float"} obs[{big}_OBS]; /* {layout} */
            {memory}{"int32_t" if isinstance(spec.action, Choices) else "float"} action[{big}_ACTIONS];
            for (int step = 0; step < 3; step++) {{
                {name}_act(obs, {"state, " if state_dim else ""}action);
                for (int i = 0; i < {big}_ACTIONS; i++) printf("%g ", (double)action[i]);
                printf("\\n");
            }}
            return 0;
        }}
    """)


def _module_lines(spec: EnvSpec, plain_id: str) -> list[str]:
    """Imports that make the environment's id known."""
    if spec.team is not None and plain_id != spec.import_module:
        return ["import lbforaging"] if spec.env_id.startswith("lbf:") else [f"from mpe2 import {plain_id}"]
    if spec.import_module is not None and is_script(spec.import_module):
        folder, name = os.path.split(spec.import_module)
        return [
            "import importlib",
            "import sys",
            "",
            f"sys.path.insert(0, {folder!r})",
            f"script = importlib.import_module({name.removesuffix('.py')!r})  # trains unless that has a main guard",
        ]
    if spec.import_module is not None:
        if not all(part.isidentifier() and not keyword.iskeyword(part) for part in spec.import_module.split(".")):
            raise ConfigError(f"the environment comes from {spec.import_module!r}, which is not the name of a module")
        return [f"import {spec.import_module}  # registers the environment"]
    if plain_id in OWN_IDS:
        return [f"import {OWN_IDS[plain_id]}  # an environment of Spreeze's own"]
    if plain_id.startswith("ALE/"):
        return ["import ale_py  # pip install ale-py", "", "gymnasium.register_envs(ale_py)"]
    return [f"import {BULLET_MODULE}  # registers the environment"] if plain_id in BULLET_IDS else []


def _make_line(spec: EnvSpec, plain_id: str) -> str:
    given = parse_args(as_single(spec.env_id, spec.args)[1])
    if spec.frames is not None and plain_id.startswith("ALE/"):
        options = spec.frames.options
        given = {
            "frameskip": 1,
            "obs_type": "grayscale",
            "repeat_action_probability": float(options["sticky_actions"]),
            "full_action_space": bool(options["full_actions"]),
            "max_num_frames_per_episode": int(options["max_episode_frames"]),
        } | given
    arguments = "".join(f", {name}={value!r}" for name, value in given.items())
    if spec.team is not None and not spec.env_id.startswith("lbf:"):
        return f"# With render_mode='human' it is shown.\nenv = {plain_id}.parallel_env({arguments[2:]})"
    if spec.team is not None:
        return f"env = gymnasium.make({plain_id!r}, disable_env_checker=True{arguments})"
    infinite = "from math import inf, nan\n\n" if {"inf", "nan"} & {*re.findall(r"\w+", arguments)} else ""
    if spec.env_id != plain_id and is_within(spec.env_id.rpartition(":")[0], spec.import_module):
        module = "script" if is_script(spec.import_module or "") else spec.import_module
        return f"{infinite}# With render_mode='human' it may be shown.\nenv = {module}.{plain_id}({arguments[2:]})"
    return f"{infinite}# With render_mode='human' it is shown.\nenv = gymnasium.make({plain_id!r}{arguments})"


def _obs_lines(spec: EnvSpec) -> list[str]:
    """Functions of the loop where an observation is not simply a vector."""
    if spec.frames is not None:
        return _image_lines(spec.frames)
    lines = []
    if spec.mask_dim and spec.action_parts and spec.choices is not None:
        parts = [(part.path, options) for part, options in options_of(spec.choices, spec.action_parts)]
        lines = [
            "", "", *policy_formats.plain_source(flags_of).splitlines(), "", "", "def flat_mask(mask):",
            f"    parts = {parts!r}",
            "    nested = isinstance(mask, (dict, tuple))",
            "    return np.concatenate([flags_of(mask, *part) for part in parts]) if nested else mask",
        ]  # fmt: skip
    if spec.parts:
        lines += textwrap.dedent("""

            def flat(space, obs):  # nested observations in the order of their sorted keys
                if isinstance(space, gymnasium.spaces.Dict):
                    return np.concatenate([flat(space[key], obs[key]) for key in sorted(space.spaces, key=str)])
                if isinstance(space, gymnasium.spaces.Tuple):
                    return np.concatenate([flat(part, value) for part, value in zip(space.spaces, obs)])
                return np.ravel(gymnasium.spaces.flatten(space, obs)).astype(np.float32)
        """).splitlines()
    if spec.team is not None:
        lines += textwrap.dedent(f"""

            def joined(obs, spaces):  # one agent after the other; the policy does not read the rest
                x = np.zeros({spec.obs_dim}, np.float32)
                for place, (agent, space) in enumerate(spaces.items()):
                    if agent in obs:
                        part = flat(space, obs[agent])
                        x[place * {spec.team.obs_dim} :][: len(part)] = part
                return x
        """).splitlines()
    return lines


def _image_lines(frames: FrameSpec) -> list[str]:
    """Functions for the images of an observation, and for the numbers beside them where there are any."""
    size = int(frames.height)
    screen = PictureSpec(path=(), shape=(), order=(2, 0, 1))  # of Atari, and of files of earlier versions
    sources = (frames.source or screen, *frames.more)
    rows = [
        f"    {source.path!r}: ({tuple(map(int, source.order))}, {str(source.bounds)[1:-1]}, "
        f"{planes == 1 if source is screen else planes < source.channels}),"
        for source, (planes, *_) in zip(sources, frames.images, strict=True)
    ]
    array = "np.asarray(picture)" if frames.source else "np.atleast_3d(picture)"
    lines = textwrap.dedent(f"""

        @functools.cache
        def weights(old):  # [old, {size}]: weight of each old pixel in the mean of each new one
            edge, pixel, scale = np.arange({size}) * old / {size}, np.arange(old)[:, None], old / {size}
            overlap = np.minimum(edge + scale, pixel + 1) - np.maximum(edge, pixel)
            return (np.maximum(overlap, 0) / scale).astype(np.float32)


        IMAGES = {{  # where they are: axes, bounds, and whether colours become grey
        ROWS
        }}


        def images(obs):  # uint8 [C, {size}, {size}] each
            small_images = []
            for path, (order, low, high, to_grey) in IMAGES.items():
                picture = functools.reduce(lambda part, key: part[key], path, obs)
                planes = {array}.transpose(order).astype(np.float32)
                planes = np.clip((planes - low) * (255 / (high - low)), 0, 255)
                if to_grey and planes.shape[-3] == 3:
                    planes = np.moveaxis(planes, -3, -1) @ np.array([0.299, 0.587, 0.114], np.float32)
                planes = planes.reshape(-1, *planes.shape[-2:])
                small = weights(planes.shape[1]).T @ planes @ weights(planes.shape[2])
                small_images.append((small + 0.5).astype(np.uint8))
            return small_images
    """)
    if not frames.is_single:
        lines += textwrap.dedent("""

            def flat(space, obs, path=()):  # the other parts in the order of their sorted keys
                if path in IMAGES:
                    return np.zeros(0, np.float32)
                if isinstance(space, gymnasium.spaces.Dict):
                    keys = sorted(space.spaces, key=str)
                    return np.concatenate([flat(space[key], obs[key], (*path, key)) for key in keys])
                if isinstance(space, gymnasium.spaces.Tuple):
                    return np.concatenate([flat(part, obs[k], (*path, k)) for k, part in enumerate(space.spaces)])
                return np.ravel(gymnasium.spaces.flatten(space, obs)).astype(np.float32)
        """)
    return lines.replace("ROWS", "\n".join(rows)).splitlines()


def _loop(spec: EnvSpec, row: PolicyFormat, state_dim: int) -> list[str]:
    if spec.team is not None:
        return _team_loop(spec, row)
    body = ["obs, info = env.reset(seed=seed)", "total, done = 0.0, False"]
    step = [
        "obs, reward, terminated, truncated, info = env.step(action)",
        "total += float(reward)",
        "done = terminated or truncated",
    ]
    if spec.frames is not None and spec.frames.is_single:
        atari = "frame_skip" in spec.frames.options and spec.env_id.startswith("ALE/")
        body.append(f"frames = images(obs) * {int(spec.frames.stack)}  # the newest, oldest first")
        see = ["x = np.stack(frames)[None]"]
        step = [
            *(_atari_step_lines(spec.frames) if atari else step),
            f"frames = frames[1:] + images({'picture' if atari else 'obs'})",
        ]
        if atari:
            body[1:1] = _atari_start_lines(spec.frames)
    else:
        space, mask = "env.observation_space", 'info["action_mask"]'
        if spec.mask_dim and spec.obs_layout[-1].endswith("action_masks()"):
            mask = 'env.get_wrapper_attr("action_masks")()'
        elif spec.mask_dim and spec.obs_layout[-1].endswith("observation['action_mask']"):
            mask = 'obs["action_mask"]'
            space = "gymnasium.spaces.Dict({key: env.observation_space[key] for key in obs if key != 'action_mask'})"
        nested = bool(spec.parts) or spec.frames is not None
        vector = f"flat({space}, obs)" if nested else "np.asarray(obs, np.float32).reshape(-1)"
        if spec.mask_dim:
            mask = f"flat_mask({mask})" if spec.action_parts else mask
            vector = f"np.concatenate([{vector}, np.asarray({mask}, np.float32)])"
        see = [f"x = {vector}[None]"]
        if spec.frames is not None:
            body.append(f"frames = [images(obs)] * {int(spec.frames.stack)}  # the newest, oldest first")
            pixels = "*(np.ravel(image) for image in zip(*frames))"
            see = [f"x = np.concatenate([{pixels}, {vector}]).astype(np.float32)[None]"]
            step = [*step, "frames = [*frames[1:], images(obs)]"]
    shaped = ".reshape(env.action_space.shape)" if spec.choices is None else ""
    shaped += ".astype(env.action_space.dtype)" if spec.action.shape != () else ""
    shaped = "" if spec.action_parts else shaped
    act = [f"action = {row.act}{shaped}"]
    if state_dim:
        body.append(f"state = np.zeros((1, {state_dim}), np.float32)  # the policy's memory of this episode")
        act = [f"actions, state = {row.act_with_state}", f"action = actions[0]{shaped}"]
    if spec.action_parts:
        act.append(f"action = {_structure(spec)}")
    body += ["while not done:", *(f"    {line}" for line in [*see, *act, *step])]
    body.append('print(f"seed {seed}: return {total:.1f}")')
    return ["for seed in range(3):", *(f"    {line}" for line in body), "env.close()"]


def _structure(spec: EnvSpec) -> str:
    """An expression that turns a row ``action`` into the environment's own action."""

    def code(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key!r}: {code(part)}" for key, part in value.items()) + "}"
        return f"({', '.join(map(code, value))},)" if isinstance(value, tuple) else str(value)

    def part_code(part: ActionPart, _: Any) -> str:
        columns = f"action[{part.begin}:{part.columns.stop}]"
        if spec.box is not None and part.start is not None:  # else the file has the environment's own numbers
            columns = f"({columns}.astype(np.int64) + {list(part.start)})"
        return f"{columns}.astype({part.dtype!r}).reshape({part.shape}){'' if part.shape else '[()]'}"

    return code(nested([(part.path, functools.partial(part_code, part)) for part in spec.action_parts])(None))


def _team_loop(spec: EnvSpec, row: PolicyFormat) -> list[str]:
    """Three episodes of a parallel environment, or of Foraging, which has tuples in agents' order."""
    foraging = spec.env_id.startswith("lbf:")
    if foraging:
        spaces, seen = "dict(enumerate(env.observation_space))", "dict(enumerate(obs))"
        step = [
            "obs, rewards, terminated, truncated, info = env.step(tuple(action.tolist()))",
            "total += sum(rewards)",
            "done = terminated or truncated",
        ]
    else:
        spaces, seen = "{agent: env.observation_space(agent) for agent in env.possible_agents}", "obs"
        step = [
            "chosen = {agent: int(env.action_space(agent).start + index)",
            "          for agent, index in zip(env.possible_agents, action) if agent in env.agents}",
            "obs, rewards, terminated, truncated, info = env.step(chosen)",
            "total += sum(rewards.values())",
            "done = all(terminated[agent] or truncated[agent] for agent in rewards)",
        ]
    body = [
        "obs, info = env.reset(seed=seed)",
        "total, done = 0.0, False",
        "while not done:",
        *(f"    {line}" for line in [f"x = joined({seen}, spaces)[None]", f"action = {row.act}", *step]),
        'print(f"seed {seed}: return of the team {total:.1f}")',
    ]
    return [f"spaces = {spaces}", "for seed in range(3):", *(f"    {line}" for line in body), "env.close()"]


def _atari_start_lines(frames: FrameSpec) -> list[str]:
    options = frames.options
    lines = [
        f"for _ in range(env.np_random.integers({int(options['noop_max']) + 1})):  # idle frames at the start",
        "    obs, *_ = env.step(0)",
    ]
    if options["fire_reset"]:
        lines += [
            'if "FIRE" in env.unwrapped.get_action_meanings():',
            '    obs, *_ = env.step(env.unwrapped.get_action_meanings().index("FIRE"))',
        ]
    return lines


def _atari_step_lines(frames: FrameSpec) -> list[str]:
    skip = int(frames.options["frame_skip"])
    return [
        "before = obs",
        f"for _ in range({skip}):",
        "    before, (obs, reward, terminated, truncated, info) = obs, env.step(action)",
        "    total += float(reward)",
        "    done = terminated or truncated",
        "    if done:",
        "        break",
        "picture = obs if done else np.maximum(before, obs)" if skip > 1 else "picture = obs",
    ]
