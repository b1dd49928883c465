"""Policies as C headers: compiled without a warning, compared with our own policy, used by the example program."""

import dataclasses
import inspect
import json
import re
import subprocess

import numpy as np
import pytest
from harness import PATIENCE_S
from test_policy_formats import (
    BITS,
    DISCRETE,
    HYBRID,
    IMAGES,
    MASKED,
    MIXED,
    PARTS,
    SEEN,
    SEVERAL,
    STEERED,
    TEAM,
    VECTOR,
    actions_of,
    exported,
    made,
    normalized,
)
from test_policy_formats import pendulum as pendulum  # a fixture

from spreeze.cli.export import c_example
from spreeze.errors import ConfigError
from spreeze.inference import agreement, c_source, policy_formats
from spreeze.inference.policy import ACTIVATIONS
from spreeze.inference.recurrence import CELLS
from spreeze.types import POLICY_FORMATS, Choices

GRID = dataclasses.replace(SEVERAL, action=Choices((3, 2, 4, 2), (1, 0, -5, 2), (2, 2)))
needs_compiler = pytest.mark.skipif(c_source.compiler() is None, reason="no C compiler here")
KINDS = {  # one algorithm of each head on each kind of task
    "squashed": ("sac", VECTOR), "deterministic": ("td3", VECTOR), "gaussian": ("ppo", VECTOR),
    "values": ("dqn", DISCRETE), "masked": ("sac", MASKED), "images": ("ppo", IMAGES), "team": ("qmix", TEAM),
    "several": ("a2c", SEVERAL), "grid": ("ppo", GRID), "bits": ("impact", BITS),
    "mixed": ("a2c", MIXED), "hybrid": ("sac", HYBRID), "distribution": ("dqn", DISCRETE),
    "parts": ("ppo", PARTS), "steered": ("sac", STEERED), "seen hybrid": ("sac", SEEN),
}  # fmt: skip


def compared(arrays, meta, spec, folder, row="c", count=1000):
    steps, obs = policy_formats.operations(arrays, meta, spec), policy_formats.draw_obs(spec, arrays, count, seed=1)
    path = folder / "policy.h"
    path.write_bytes(policy_formats.encode(row, steps, spec, {"name": "walker-2"}))
    act = policy_formats.open_policy(row, path)
    return agreement.check(
        act, steps, actions_of(arrays, meta, spec, obs), obs, spec, exact=row == "c"
    ), path.read_text()


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_a_header_acts_as_the_policy_and_gives_the_compiler_nothing_to_warn_of(kind, tmp_path):
    name, spec = KINDS[kind]
    arrays, meta = made(name, spec, **({"critics": "categorical"} if kind == "distribution" else {}))
    if spec.vector_dim:
        arrays = normalized(arrays, spec.vector_dim, spec.mask_dim)
    check, text = compared(arrays, meta, spec, tmp_path, count=20 if spec.frames else 1000)
    assert check.difference <= (1e-5 if spec.box else 0)
    assert not check.wrong
    assert "alloc" not in text.replace("without allocation", "")
    assert "math.h" not in text


@needs_compiler
def test_every_activation_is_computed_without_a_library(tmp_path):
    rng = np.random.default_rng(0)
    for activation in ACTIVATIONS:
        arrays, meta = made("sac", VECTOR, activation=activation, actor_layer_norm=activation == "elu")
        arrays |= {name: rng.normal(size=arrays[name].shape).astype(np.float32) for name in ("b0", "b1")}
        assert compared(normalized(arrays, 5), meta, VECTOR, tmp_path)[0].difference <= 1e-5


@needs_compiler
def test_eight_bits_take_a_third_of_the_file_and_a_hundredth_of_the_range(tmp_path):
    arrays, meta = made("td3", VECTOR, hidden_sizes=(64, 64))
    exact, text = compared(normalized(arrays, 5), meta, VECTOR, tmp_path)
    rounded, short = compared(normalized(arrays, 5), meta, VECTOR, tmp_path, "c-int8")
    assert exact.difference < 1e-5 < rounded.difference < 0.03
    assert len(short) < len(text) / 2.5


def test_each_column_of_eight_bits_is_in_units_of_its_largest_magnitude():
    source = c_source._Source("p", np.zeros(2, np.float32), 0, int8=True)
    name, unit = source._weights(np.array([[1.0, -254.0], [0.5, 127.0]], np.float32), 1)
    assert unit.tolist() == pytest.approx([1.0 / 127.0, 2.0])
    assert source._constants == [f"static const int8_t {name}[4] = {{\n    127, -127, 64, 64\n}};"]


@needs_compiler
def test_two_policies_fit_into_one_program(tmp_path):
    calls = []
    for name in ("left", "right"):
        arrays, meta = made("sac", VECTOR)
        steps = policy_formats.operations(arrays, meta, VECTOR)
        (tmp_path / f"{name}.h").write_bytes(policy_formats.encode("c", steps, VECTOR, {"name": name}))
        calls.append(f"{name}_act(obs, action);")
    program = tmp_path / "both.c"
    program.write_text(
        '#include "left.h"\n#include "right.h"\n'
        "int main(void) { float obs[LEFT_OBS] = {0}, action[RIGHT_ACTIONS];"
        f"{' '.join(calls)} return action[0] > 9; }}\n"
    )
    built([program], tmp_path / "both")


def built(sources, out):
    done = subprocess.run(
        [c_source.compiler(), *c_source.FLAGS, "-o", str(out), *map(str, sources), "-lm"],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return subprocess.run([str(out)], capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout


@needs_compiler
def test_the_command_writes_a_checked_header_and_a_program_that_compiles(pendulum, tmp_path, capsys):
    out = tmp_path / "mine.h"
    assert exported(pendulum, "--format", "c", "--out", out) == 0
    told = capsys.readouterr().out
    assert "checked beside our policy on 1,000 observations: actions differ by at most" in told
    program = tmp_path / "mine_c_example.c"
    assert program.read_text() in told
    lines = built([program], tmp_path / "mine").splitlines()
    assert len(lines) == 3
    assert all(-2.0 <= float(line) <= 2.0 for line in lines)
    assert exported(pendulum, "--format", "c-int8", "--out", out, "--force", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert 1e-5 < told["mean"] < told["difference"] < 0.05


@needs_compiler
def test_the_program_of_a_policy_with_memory_keeps_its_state(tmp_path):
    arrays, meta = made("ppo", VECTOR, recurrent="gru", recurrent_size=7)
    arrays |= {"head_w": 100.0 * arrays["head_w"], "cell_x_bias": np.ones_like(arrays["cell_x_bias"])}
    steps = policy_formats.operations(arrays, meta, VECTOR)
    (tmp_path / "memory.h").write_bytes(policy_formats.encode("c", steps, VECTOR, {"name": "memory"}))
    program = tmp_path / "memory.c"
    program.write_text(c_example(VECTOR, "memory.h", policy_formats.state_dim(steps)))
    assert len(set(built([program], tmp_path / "memory").splitlines())) == 3, "an action depends on those before it"


def test_without_a_compiler_the_header_is_written_and_said_to_be_unchecked(pendulum, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(c_source.shutil, "which", lambda name: None)
    assert exported(pendulum, "--format", "c", "--out", tmp_path / "mine.h", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["observations"], document["difference"]) == (None, None)
    assert exported(pendulum, "--format", "c", "--out", tmp_path / "mine.h", "--force") == 0
    assert "not checked: there is no C compiler (cc, gcc, clang) here" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="install one of cc, gcc, clang"):
        c_source.open_header(tmp_path / "mine.h")


def test_names_are_those_of_c_and_no_text_ends_a_comment():
    assert [c_source.c_name(name) for name in ("walker-2", "2walk", "int", "lauf ä", "_x")] == [
        "walker_2", "policy_2walk", "policy_int", "lauf__", "policy__x"]  # fmt: skip
    arrays, meta = made("sac", VECTOR)
    spec = dataclasses.replace(VECTOR, env_id="x*/ int y; /*\n*\\\n/ ??/")
    steps = policy_formats.operations(arrays, meta, spec)
    text = policy_formats.encode("c", steps, spec, {"name": "x", "env": spec.env_id}).decode()
    assert text.count("*/") == 1
    assert "\\" not in text


def test_every_operation_has_its_c():
    named = re.findall(r'^ {8}"(\w+)": ', inspect.getsource(policy_formats.run), re.MULTILINE)
    assert set(ACTIVATIONS) <= {*named}
    kinds = {kind for kind in (*named, *CELLS) if not hasattr(c_source._Source, f"_{kind}")}
    assert kinds <= c_source._FUNCTIONS.keys()
    with pytest.raises(ConfigError, match="'fourier', which has no C yet"):
        c_source.header([policy_formats.Operation("fourier")], np.zeros(1, np.float32), 0, {}, "x")


def test_every_c_format_is_a_header():
    assert {row.name for row in POLICY_FORMATS if row.suffix == ".h"} == {"c", "c-int8"}
