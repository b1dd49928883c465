"""Exported policies: every algorithm and format beside our own policy, and the command with its example."""

import csv
import dataclasses
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import two_step_game
from harness import PATIENCE_S, REPO, SUPPORT
from rollouts import FRAMES, learner, task

from spreeze.algorithms import create
from spreeze.cli import export as command
from spreeze.config.algorithms import rows
from spreeze.config.schema import SECTIONS
from spreeze.dashboard import control
from spreeze.envs.task import ActionScaling, make_task
from spreeze.errors import ConfigError, WeightsError
from spreeze.inference import agreement, c_source, heads, policy_formats
from spreeze.inference.normalizer import OBS_CLIP
from spreeze.inference.policy import ACTIVATIONS, Policy
from spreeze.metrics.store import EvaluationRow
from spreeze.metrics.writer import MetricsWriter
from spreeze.transport.weights import WeightsStore, read_weights
from spreeze.types import POLICY_FORMATS, Box, Choices, EnvSpec, Mixed, PictureSpec, TeamSpec
from spreeze.workers.episodes.lockstep import run_episodes

PYTHON_FORMATS = [row for row in POLICY_FORMATS if row.suffix != ".h"]
FORMATS = [row.name for row in PYTHON_FORMATS]
LIGHT = [name for name in FORMATS if name != "torch"]
VECTOR = dataclasses.replace(task(obs_dim=5), action=Box((-2.0, 0.0), (2.0, 3.0)))
DISCRETE = dataclasses.replace(task(obs_dim=5), action=Choices((4,), (3,)))
MASKED = dataclasses.replace(task(obs_dim=9, actions=4, discrete=True), action_mask=True)
IMAGES = task(obs_dim=2 * 36 * 36, actions=4, discrete=True, frames=FRAMES)
TEAM = dataclasses.replace(
    task(obs_dim=3 * 4 + 2),
    action=Choices((4, 2, 3), shape=(3,)),
    team=TeamSpec(actions=(4, 2, 3), obs_dim=4, state_dim=2),
)
SEVERAL = dataclasses.replace(task(obs_dim=5), action=Choices((3, 2, 4), (1, 0, -5), (3,)))
BITS = dataclasses.replace(task(obs_dim=5 + 8), action=Choices((2,) * 4, shape=(2, 2)), action_mask=True)
MIXED = dataclasses.replace(
    task(obs_dim=5 + 9), action=Mixed(Box((-0.4, -2.0), (0.4, 1.0)), Choices((3, 2, 4), (1, 0, -5))), action_mask=True
)
HYBRID = dataclasses.replace(
    task(obs_dim=5 + 3), action=Mixed(Box((-0.4, -2.0), (0.4, 1.0)), Choices((3,))), action_mask=True
)
BESIDE = dataclasses.replace(FRAMES, more=(PictureSpec(path=("b",), shape=(40, 40), order=(0, 1)),), vector_dim=5)
PARTS = dataclasses.replace(
    task(obs_dim=2 * BESIDE.frame_bytes), frames=BESIDE, action=Choices((3, 2), shape=(2,)), action_mask=True
)
STEERED = dataclasses.replace(PARTS, action=VECTOR.action, action_mask=False)
SEEN = dataclasses.replace(PARTS, action=HYBRID.action)
TASKS = {
    "vector": VECTOR,
    "discrete": DISCRETE,
    "masked": MASKED,
    "images": IMAGES,
    "team": TEAM,
    "several": SEVERAL,
    "bits": BITS,
    "mixed": MIXED,
    "hybrid": HYBRID,
    "parts": PARTS,
    "steered": STEERED,
    "seen": SEEN,
}
CASES = [(row.name, kind) for row in rows().values() for kind, spec in TASKS.items() if row.fits(spec)]
REPEATED = {(name, kind) for name, kind in CASES if name in ("a2c", "impact", "appo", "impala", "ddpg")}
"""Cases whose policies are those of PPO, or of TD3."""
_FIRST = {kind: name for name, kind in reversed(CASES)}
IN_TORCH = {("td3", "vector"), ("ppo", "vector"), *((name, kind) for kind, name in _FIRST.items())}
"""Cases of each kind of task, and of each head of a policy, in PyTorch's format too, which takes most of the time."""


def made(name, spec, **settings):
    """Weights of a fresh algorithm, as a learner publishes them."""
    row = next(row for row in rows().values() if row.name == name)
    settings = {"hidden_sizes": (24, 16), **({"cnn": "impala_small"} if spec.frames else {}), **settings}
    if row.on_policy:
        algorithm = learner(name, spec, **settings)
        meta = algorithm.policy_meta()
    else:
        config = dataclasses.replace(SECTIONS[name](), **settings)
        options = ({"masked": True} if spec.action_mask else {}) | ({"frames": spec.frames} if spec.frames else {})
        options |= {"team": spec.team} if spec.team else {}
        options |= {"num_continuous": spec.box.dim} if spec.box and spec.choices else {}
        algorithm = create(
            name,
            spec.obs_dim,
            spec.action_dim,
            config,
            1,
            **options,
            num_actions=max(spec.choices.nvec) if spec.choices else None,
        )
        meta = algorithm.policy_meta()
    return algorithm.policy_arrays(), meta | {"env": dataclasses.asdict(spec), "algo": name}


def normalized(arrays, obs_dim, mask_dim=0):
    mean, std = np.arange(obs_dim, dtype=np.float32), np.linspace(0.01, 9.0, obs_dim, dtype=np.float32)
    mean[obs_dim - mask_dim :], std[obs_dim - mask_dim :] = 0.0, 1.0
    return arrays | {"obs_mean": mean, "obs_std": std}


def actions_of(arrays, meta, spec, obs):
    actions = ActionScaling(spec)(Policy.from_weights(arrays, meta).act(obs, ())[0])
    if spec.team is not None:
        return actions.astype(np.int64)
    return spec.choices.to_env(actions) if isinstance(spec.action, Choices) else actions


def compare(arrays, meta, spec, tmp_path, formats=FORMATS, count=300):
    steps, obs = policy_formats.operations(arrays, meta, spec), policy_formats.draw_obs(spec, arrays, count, seed=1)
    expected, found = actions_of(arrays, meta, spec, obs), []
    for row in POLICY_FORMATS:
        if row.name in formats:
            path = tmp_path / f"policy{row.suffix}"
            path.write_bytes(policy_formats.encode(row.name, steps, spec, {"env": spec.env_id}))
            found.append(agreement.check(policy_formats.open_policy(row.name, path), steps, expected, obs, spec))
    return found, expected, obs


def test_every_kind_of_policy_has_its_operations():
    assert policy_formats._HEADS.keys() == heads._HEADS.keys()
    assert policy_formats._CODECS.keys() == {row.name for row in POLICY_FORMATS}


RAINBOW = {"critics": "categorical", "noisy": True, "dueling": True}
"""DQN whose files hold the mean of each action's distribution, without noise."""


@pytest.mark.parametrize(("name", "kind", "settings", "formats"), [
    *(pytest.param(*case, {}, FORMATS, marks=() if case in IN_TORCH else pytest.mark.slow) for case in CASES),
    *((*case, {}, LIGHT) for case in CASES if case not in IN_TORCH | REPEATED),
    ("dqn", "discrete", RAINBOW, FORMATS),
    *(("dqn", kind, RAINBOW, LIGHT) for kind in ("masked", "images")),
    ("dqn", "discrete", RAINBOW | {"critics": "quantile"}, LIGHT),
])  # fmt: skip
def test_every_algorithm_acts_the_same_in_every_format(name, kind, settings, formats, tmp_path):
    spec = TASKS[kind]
    arrays, meta = made(name, spec, **settings)
    if spec.vector_dim:
        arrays = normalized(arrays, spec.vector_dim, spec.mask_dim)
    count = 20 if spec.frames else 1000
    found, expected, obs = compare(arrays, meta, spec, tmp_path, formats, count)
    assert [check.observations for check in found] == [count] * len(formats)
    if spec.box is not None:
        assert max(check.difference for check in found) <= 1e-5
        assert (expected[:, : spec.box.dim] >= spec.box.low).all()
        assert (expected[:, : spec.box.dim] <= spec.box.high).all()
    if spec in (MIXED, HYBRID, SEEN):
        columns = expected[:, 2:].astype(int) + [part.start for part in spec.choices.slices]
        assert np.take_along_axis(spec.masks(obs), columns, 1).all()
    elif spec is BITS:
        columns = spec.obs_dim - 8 + 2 * np.arange(4) + expected.reshape(count, 4)
        assert np.take_along_axis(obs, columns, 1).all()
    elif spec is PARTS:
        assert np.take_along_axis(spec.masks(obs), expected + np.array([0, 3]), 1).all()
    elif spec.action_mask:
        assert obs[np.arange(count), spec.obs_dim - spec.mask_dim + expected].all()
    if spec.team is not None:
        assert expected.shape == (count, 3)
        assert expected.max(0).tolist() == [3, 1, 2], "no agent takes an action that it lacks"


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_with_layer_norm_acts_the_same(activation, tmp_path):
    arrays, meta = made("sac", VECTOR, activation=activation, actor_layer_norm=True)
    rng = np.random.default_rng(0)
    arrays |= {name: rng.normal(size=arrays[name].shape).astype(np.float32) for name in ("b0", "b1")}
    formats = FORMATS if activation == ACTIVATIONS[-1] else LIGHT
    compare(normalized(arrays, 5), meta, VECTOR, tmp_path, formats)


def test_a_saturated_action_stays_within_bounds_that_no_float32_has(tmp_path):
    spec = EnvSpec(
        env_id="T-v0",
        import_module=None,
        obs_dim=1,
        action=Box((-0.4,), (0.4,)),
        max_episode_steps=None,
        reward_threshold=None,
    )
    meta = {"policy": "deterministic", "hidden_sizes": [], "obs_dim": 1, "action_dim": 1}
    arrays = {"head_w": np.full((1, 1), 100.0, np.float32), "head_b": np.zeros(1, np.float32)}
    steps = policy_formats.operations(arrays, meta, spec)
    path = tmp_path / "policy.npz"
    path.write_bytes(policy_formats.encode("numpy", steps, spec, {"env": spec.env_id}))
    actions, _ = policy_formats.open_policy("numpy", path)(np.array([[1.0], [-1.0]], np.float32), ())
    assert np.abs(np.asarray(actions, np.float64)).max() <= 0.4


def test_observations_of_the_check_lead_beyond_the_clips_of_the_normalizer():
    arrays, meta = made("td3", VECTOR)
    arrays = normalized(arrays, 5)
    obs = policy_formats.draw_obs(VECTOR, arrays, 300, seed=1)
    scaled = np.abs(obs - arrays["obs_mean"]) / arrays["obs_std"]
    assert 0.05 < (scaled > OBS_CLIP).mean() < 0.6
    steps = policy_formats.operations(arrays, meta, VECTOR)
    first = next(place for place, step in enumerate(steps) if step.kind == "clip")
    without = steps[:first] + steps[first + 1 :]
    with pytest.raises(WeightsError, match="differ by up to"):
        agreement.check(
            lambda x, state: (policy_formats.run(policy_formats.numpy_arrays(without), x), state),
            without,
            actions_of(arrays, meta, VECTOR, obs),
            obs,
            VECTOR,
        )


def test_another_discrete_action_is_found_and_a_tie_is_left_out():
    arrays, meta = made("dqn", DISCRETE)
    steps, obs = (
        policy_formats.operations(arrays, meta, DISCRETE),
        policy_formats.draw_obs(DISCRETE, arrays, 50, seed=1),
    )
    expected = actions_of(arrays, meta, DISCRETE, obs)
    with pytest.raises(WeightsError, match="another action for 1 of 50"):
        agreement.check(
            lambda x, state: (np.where(np.arange(50) == 7, (expected - 2) % 4 + 3, expected), state),
            steps,
            expected,
            obs,
            DISCRETE,
        )
    arrays = {name: np.zeros_like(array) for name, array in arrays.items()}
    equal = agreement.check(
        lambda x, state: (expected + 1, state),
        policy_formats.operations(arrays, meta, DISCRETE),
        expected,
        obs,
        DISCRETE,
    )
    assert equal == agreement.Agreement(50, 0.0, 50)


@pytest.mark.parametrize("spec", [VECTOR, DISCRETE], ids=["vector", "discrete"])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_policy_with_memory_takes_its_state_and_gives_the_next_in_each_format(kind, spec, tmp_path):
    arrays, meta = made("ppo", spec, recurrent=kind, recurrent_size=7)
    arrays = normalized(arrays, spec.obs_dim) | {"head_w": 100.0 * arrays["head_w"]}
    steps, obs = policy_formats.operations(arrays, meta, spec), policy_formats.draw_obs(spec, arrays, 1000, seed=1)
    state = policy_formats.draw_state(steps, 1000, seed=2)
    drawn, after = Policy.from_weights(arrays, meta).act(obs, state)
    expected = ActionScaling(spec)(drawn) if spec.choices is None else spec.choices.to_env(drawn)
    for row in POLICY_FORMATS:
        if row.suffix == ".h" and (c_source.compiler() is None or not row.exact):
            continue
        path = tmp_path / f"policy{row.suffix}"
        path.write_bytes(policy_formats.encode(row.name, steps, spec, {"env": spec.env_id}))
        act = policy_formats.open_policy(row.name, path)
        found = agreement.check(act, steps, expected, obs, spec, state, after)
        assert found.difference < agreement.TOLERANCE
        with pytest.raises(WeightsError, match="next states differ by up to"):
            agreement.check(act, steps, expected, obs, spec, state, (after[0] + 0.01,))
        begun, _ = act(obs, (np.zeros_like(state[0]),))
        assert np.abs(begun - expected).max() > 1e-3
    program = command.example(spec, PYTHON_FORMATS[-1], "policy.npz", state_dim=state[0].shape[1])
    assert "actions, state = run_with_state(policy, x, state)" in program
    assert "run_with_state" not in command.example(spec, PYTHON_FORMATS[-1], "policy.npz")


def test_a_network_of_ones_own_is_refused_with_the_reason():
    spec = dataclasses.replace(VECTOR, import_module="my_nets")
    with pytest.raises(ConfigError, match=r"custom network 'residual' of my_nets.*torch\.export"):
        policy_formats.operations({}, {"policy": "deterministic", "network": "residual"}, spec)


# --- the command ---


def run_of(tmp_path, algo, spec, **settings):
    """A run directory with weights, metrics and one evaluation."""
    path = tmp_path / "runs" / "mine"
    path.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps({"env_id": spec.env_id, "algo": algo, "state": "finished"}))
    arrays, meta = made(algo, spec, **settings)
    WeightsStore(path / "weights").publish(arrays, meta, 1, 5)
    writer = MetricsWriter(path / "metrics.db")
    writer.write(1.0, 10, {"updates_per_s": 100.0})
    writer.write(2.0, 20, {"updates_per_s": 50.0})
    writer.evaluation(EvaluationRow(2.0, 20, 5, 1, 5, 3, -7.25, 0.5, 200.0))
    writer.close()
    return path


@pytest.fixture
def pendulum(tmp_path):
    env = make_task("Pendulum-v1")
    env.close()
    return run_of(tmp_path, "sac", env.spec)


def exported(run, *args):
    return command.main([run.name, "--runs-dir", str(run.parent), *map(str, args)])


def played(program, tmp_path, module_folder=None):
    """Output of a program in a process where Spreeze cannot be imported."""
    blocked = tmp_path / "blocked"
    (blocked / "spreeze").mkdir(parents=True, exist_ok=True)
    (blocked / "spreeze" / "__init__.py").write_text("raise ImportError('no Spreeze here')\n")
    path = os.pathsep.join([str(blocked), *([str(module_folder)] if module_folder else [])])
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
        timeout=PATIENCE_S,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("row", [
    pytest.param(row, id=row.name, marks=[pytest.mark.slow] if row.name == "torch" else []) for row in PYTHON_FORMATS
])  # fmt: skip
def test_the_command_writes_a_checked_file_and_a_program_that_plays_without_spreeze(row, pendulum, tmp_path, capsys):
    out = tmp_path / f"mine{row.suffix}"
    assert exported(pendulum, "--format", row.name, "--out", out) == 0
    told = capsys.readouterr().out
    assert "checked beside our policy on 1,000 observations: actions differ by at most" in told
    program = tmp_path / f"mine_{row.name}_example.py"
    assert program.read_text() in told
    assert "import spreeze" not in program.read_text()
    assert len(program.read_text().splitlines()) <= (24 if row.name != "numpy" else 72)
    lines = played(program, tmp_path).splitlines()
    assert [line.split(": return ")[0] for line in lines] == ["seed 0", "seed 1", "seed 2"]
    assert all(-2000.0 < float(line.split()[-1]) < 0.0 for line in lines)
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "blocked", out.name, program.name}
    if zipfile.is_zipfile(out):
        with zipfile.ZipFile(out) as archive:
            pickles = [part for part in archive.infolist() if part.filename.endswith((".pkl", ".pt"))]
        assert all(part.file_size == 0 for part in pickles)


CODE = {  # environment, its module, algorithm, words that its example must have
    "frames": ("test/Counter-v0", "image_env", "dqn", "frames = frames[1:] + images(obs)"),
    "masks": ("tests/Masked-v0", "masked_env", "ppo", 'info["action_mask"]'),
    "channels first": ("habits/First-v0", "habits_env", "dqn", "(): ((0, 1, 2), "),
    "picture in a dictionary": ("habits/Nested-v0", "habits_env", "dqn", "('eye',): ((2, 0, 1), "),
    "masks of a method": ("habits/Method-v0", "habits_env", "ppo", 'get_wrapper_attr("action_masks")()'),
    "masks observed": ("habits/Observed-v0", "habits_env", "ppo", 'np.asarray(obs["action_mask"]'),
    "several choices": ("tests/Choices-v0", "choices_env", "ppo", ")[0].astype(env.action_space.dtype)"),
    "nested": ("NestedGoal-v0", "nested_env", "sac", "def flat(space, obs)"),
    "team": ("parallel:two_step_game", "two_step_game", "qmix", "env = two_step_game.parallel_env()"),
}


@pytest.mark.parametrize("kind", sorted(CODE))
def test_examples_of_frames_masks_and_nested_observations_play_as_the_run_does(kind, tmp_path, capsys, monkeypatch):
    env_id, module, algo, words = CODE[kind]
    folder = SUPPORT
    if kind == "team":  # the example does not have Spreeze
        folder = tmp_path / "modules"
        folder.mkdir()
        shutil.copy(two_step_game.__file__, folder)
        monkeypatch.syspath_prepend(folder)
    env = make_task(env_id, module, image={"size": 36, "stack": 2})
    run = run_of(tmp_path, algo, env.spec)
    out = tmp_path / "policy.npz"
    assert exported(run, "--format", "numpy", "--out", out, "--json") == 0
    assert json.loads(capsys.readouterr().out)["observations"] == 1000
    program = tmp_path / "policy_numpy_example.py"
    assert words in program.read_text()
    lines = played(program, tmp_path, folder).splitlines()
    env.close()
    ours = _returns(lambda: make_task(env_id, module, image={"size": 36, "stack": 2}), run)
    assert [float(line.split()[-1]) for line in lines] == pytest.approx(ours, abs=0.06)


def _returns(make, run):
    """Greedy returns of seeds 0, 1 and 2 by our own task and policy."""
    weights = read_weights(next((run / "weights").glob("*.safetensors")))
    act = Policy.from_weights(weights.arrays, weights.meta).act
    return [episode.episode_return for episode in run_episodes(make, act, [0, 1, 2])]


@pytest.mark.parametrize(
    ("env_id", "package"), [("mpe2:simple_spread_v3", "mpe2"), ("lbf:Foraging-5x5-2p-1f-v3", "lbforaging")]
)
def test_the_example_of_a_team_plays_its_package_without_spreeze(env_id, package, tmp_path):
    pytest.importorskip(package)
    env = make_task(env_id)
    run = run_of(tmp_path, "qmix", env.spec)
    env.close()
    out = tmp_path / "policy.npz"
    assert exported(run, "--format", "numpy", "--out", out) == 0
    lines = played(tmp_path / "policy_numpy_example.py", tmp_path).splitlines()
    ours = _returns(lambda: make_task(env_id), run)
    assert [float(line.split()[-1]) for line in lines] == pytest.approx(ours, abs=0.06)


def test_text_of_a_weights_file_never_becomes_code(tmp_path):
    spec = dataclasses.replace(VECTOR, env_id="x')\nimport os\n('", args=("a='\\nprint(1)'",))
    text = command.example(spec, POLICY_FORMATS[0], "a'b.onnx")
    compile(text, "example", "exec")
    assert "\nimport os" not in text
    assert "\nprint(1)" not in text
    with pytest.raises(ConfigError, match="not the name of a module"):
        command.example(dataclasses.replace(spec, import_module="os\nimport sys"), POLICY_FORMATS[0], "x")


def test_the_example_of_an_atari_game_skips_frames_as_the_run_did():
    pong = make_task("ALE/Pong-v5")
    pong.close()
    text = command.example(pong.spec, POLICY_FORMATS[0], "pong.onnx")
    compile(text, "example", "exec")
    for words in ("import ale_py", "frameskip=1, obs_type='grayscale', repeat_action_probability=0.25",
                  "for _ in range(4):", "np.maximum(before, obs)", "integers(31)"):  # fmt: skip
        assert words in text, words


def test_csv_has_metrics_and_evaluations(pendulum, tmp_path, capsys):
    assert exported(pendulum, "--format", "csv", "--out", tmp_path / "m.csv") == 0
    assert "2 points" in capsys.readouterr().out
    with open(tmp_path / "m.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["wall_s"], row["env_steps"], row["metric"], row["mean"]) for row in rows] == [
        ("1.0", "10", "updates_per_s", "100.0"), ("2.0", "20", "updates_per_s", "50.0")]  # fmt: skip
    with open(tmp_path / "m_evaluations.csv", newline="") as file:
        assert next(csv.DictReader(file))["return_mean"] == "-7.25"


def test_what_cannot_be_exported_is_refused_and_leaves_no_file(pendulum, tmp_path, capsys, monkeypatch):
    def refused(*args):
        assert exported(pendulum, *args) == 2
        return capsys.readouterr().err

    assert "no such format; did you mean 'onnx'?" in refused("--format", "onx")
    assert "no such directory" in refused("--out", tmp_path / "no" / "x.onnx")
    assert "it is a directory" in refused("--out", tmp_path)
    (tmp_path / "there.npz").write_text("mine")
    assert "there.npz exists: choose another --out, or overwrite it with --force" in refused(
        "--format", "numpy", "--out", tmp_path / "there.npz"
    )
    assert "cannot write /proc/x.npz" in refused("--format", "numpy", "--out", "/proc/x.npz")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "needs onnx and onnxruntime: pip install 'spreeze[export]'" in refused("--out", tmp_path / "x.onnx")
    assert (tmp_path / "there.npz").read_text() == "mine"
    assert exported(pendulum, "--format", "numpy", "--out", tmp_path / "there.npz", "--force") == 0
    for path in (pendulum / "weights").iterdir():
        path.unlink()
    assert "has no weights: it ended" in refused("--format", "numpy", "--out", tmp_path / "x.npz")
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "there.npz", "there_numpy_example.py"}


def test_a_file_that_acts_otherwise_is_never_put_in_place(pendulum, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        policy_formats, "open_policy", lambda *_: lambda obs, state: (np.zeros((len(obs), 1), np.float32), state)
    )
    assert exported(pendulum, "--format", "numpy", "--out", tmp_path / "x.npz") == 1
    assert "no file was written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_the_extra_names_what_the_formats_need():
    text = (REPO / "pyproject.toml").read_text()
    line = next(line for line in text.splitlines() if line.startswith("export = "))
    assert all(package in line for row in POLICY_FORMATS for package in row.packages if package != "torch")


# --- the page ---


def _downloaded(run, kind, suffix):
    return control.export_zip(run, run.parent, kind, suffix)


def test_the_page_gives_metrics_and_evaluations_as_tables(pendulum):
    with zipfile.ZipFile(io.BytesIO(_downloaded(pendulum, "csv", ".csv"))) as archive:
        assert sorted(archive.namelist()) == ["mine/mine.csv", "mine/mine_evaluations.csv"]
        assert b"updates_per_s" in archive.read("mine/mine.csv")


def test_the_page_gives_the_policy_and_its_example_as_a_zip(pendulum):
    numpy_file = next(row for row in POLICY_FORMATS if row.name == "numpy")
    assert control.why_no_export(pendulum, numpy_file) is None
    with zipfile.ZipFile(io.BytesIO(_downloaded(pendulum, numpy_file.name, numpy_file.suffix))) as archive:
        assert sorted(archive.namelist()) == ["mine/mine.npz", "mine/mine_numpy_example.py"]
        assert b"mine.npz" in archive.read("mine/mine_numpy_example.py")


def test_the_page_says_why_there_is_no_policy_to_download(pendulum, monkeypatch):
    onnx = POLICY_FORMATS[0]
    (pendulum / "config.toml").write_text("[sac]\nnetwork = 'mine'\n")
    assert "custom module" in control.why_no_export(pendulum, onnx)
    for path in (pendulum / "weights").iterdir():
        path.unlink()
    assert "no weights" in control.why_no_export(pendulum, onnx)
    with zipfile.ZipFile(io.BytesIO(_downloaded(pendulum, onnx.name, onnx.suffix))) as archive:
        assert b"has no weights: it ended" in archive.read("mine/export_failed.txt")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'spreeze[export]'" in control.why_no_export(pendulum, onnx)
