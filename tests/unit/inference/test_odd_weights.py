"""Weights files with a valid checksum and odd metadata: one line in every verb and in the API, never a traceback."""

import copy
import errno
import itertools
import json
import math
import shutil
from pathlib import Path

import pytest

import spreeze
from spreeze.__main__ import main_of
from spreeze.cli.arguments import guarded
from spreeze.cli.evaluate import main as evaluate
from spreeze.cli.evaluate import policy_of, pretrained_policies, recorded_spec
from spreeze.cli.export import main as export
from spreeze.envs.task import spec_from
from spreeze.errors import SpreezeError, WeightsError
from spreeze.inference.policy import Policy
from spreeze.transport.weights import encode, read_weights
from spreeze.types import EnvSpec

ODD = (None, "x", "", 0, -1, 3, 1.5, float("nan"), float("inf"), 10**12, 10**400, True, [], [1], ["x"], [[]], {},
       {"a": 1})  # fmt: skip
GOOD = read_weights(pretrained_policies()["double-pendulum"])
ENV = tuple(GOOD.meta["env"])
TOP = tuple(dict.fromkeys([*GOOD.meta, "hidden_sizes", "activation", "cnn", "image", "team_actions", "team_obs_dim",
                           "network", "action_mask", "layer_norm", "obs_dim", "policy", "env_steps"]))  # fmt: skip


def changed(*path, value):
    """The metadata with one value changed."""
    meta = copy.deepcopy(GOOD.meta)
    place = meta
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return meta


CASES = [*(((key,), value) for key, value in itertools.product(TOP, ODD)),
         *((("env", key), value) for key, value in itertools.product(ENV, ODD))]  # fmt: skip
_STEP = 5
assert math.gcd(_STEP, len(ODD)) == 1, "else a part would not meet each value"


def written(folder, meta, arrays=None):
    path = folder / "odd.safetensors"
    path.write_bytes(encode(GOOD.arrays if arrays is None else arrays, meta, GOOD.epoch, GOOD.version))
    return path


def outcome(path):
    """None where the file is used, else the one line."""
    try:
        weights = read_weights(path)
        policy_of(weights, recorded_spec(weights))
        spreeze.load_policy(path)
    except SpreezeError as error:
        return str(error)
    return None


def test_the_file_that_the_cases_change_is_good(tmp_path):
    assert outcome(written(tmp_path, GOOD.meta)) is None


@pytest.mark.parametrize("cases", [CASES[::_STEP], pytest.param(CASES, marks=pytest.mark.slow)], ids=["some", "all"])
def test_each_odd_value_of_the_metadata_is_used_or_refused_in_one_line(tmp_path, cases):
    refused = 0
    for path, value in cases:
        told = outcome(written(tmp_path, changed(*path, value=value)))
        assert told is None or "\n" not in told, (path, value)
        refused += told is not None
    assert refused > len(cases) // 3


@pytest.mark.parametrize("key", [*TOP, "obs_mean", "obs_std"])
def test_each_part_that_is_missing_is_used_or_refused_in_one_line(tmp_path, key):
    meta, arrays = copy.deepcopy(GOOD.meta), dict(GOOD.arrays)
    meta.pop(key, None)
    arrays.pop(key, None)
    told = outcome(written(tmp_path, meta, arrays))
    assert told is None or "\n" not in told


@pytest.mark.parametrize("name", sorted(GOOD.arrays))
@pytest.mark.parametrize("shape", ["transposed", "flat", "empty", "three", "missing"])
def test_arrays_of_another_shape_are_one_line(tmp_path, name, shape):
    arrays = dict(GOOD.arrays)
    array = arrays.pop(name)
    if shape != "missing":
        arrays[name] = {"transposed": array.T, "flat": array.reshape(-1)[:1], "empty": array[:0],
                        "three": array[None, None]}[shape]  # fmt: skip
    told = outcome(written(tmp_path, GOOD.meta, arrays))
    assert told is None or "\n" not in told


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("hidden_sizes",), None),
        (("env", "obs_dim"), "x"),
        (("cnn",), ["nature"]),
        (("env", "env_id"), 7),
        (("env", "args"), 7),
        (("env", "frames"), 7),
        (("env", "action_low"), []),
        (("env",), []),
    ],
)
def test_evaluate_and_export_tell_one_line(tmp_path, capsys, path, value):
    file = str(written(tmp_path, changed(*path, value=value)))
    for verb in (evaluate, export):
        more = ["--format", "numpy", "--out", str(tmp_path / "out.npz")] if verb is export else ["--episodes", "1"]
        assert verb([file, *more]) in (1, 2)
        told = capsys.readouterr().err.splitlines()
        assert len(told) == 1
        assert told[0].startswith("error: ")
    assert not list(tmp_path.glob("out*"))


def test_metadata_of_no_policy_are_a_weights_error():
    for key, value in (("hidden_sizes", None), ("policy", []), ("obs_dim", "x"), ("activation", [])):
        with pytest.raises(WeightsError):
            Policy.from_weights(GOOD.arrays, changed(key, value=value))


def test_a_description_survives_json():
    spec = recorded_spec(GOOD)
    assert spec_from(json.loads(json.dumps(GOOD.meta["env"]))) == spec
    assert isinstance(spec, EnvSpec)


@pytest.mark.parametrize("verb", ["evaluate", "play", "report", "export"])
def test_a_path_with_a_part_of_300_letters_is_one_line(capsys, verb):
    for path in ("/" + 300 * "a", "/" + 300 * "a" + "/b", 300 * "a" + ".safetensors", f"x/{300 * 'a'}.safetensors"):
        assert main_of(verb)([path]) == 2
        told = capsys.readouterr().err.splitlines()
        assert len(told) == 1, told
        assert len(told[0]) < 1000


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EMFILE, "raise the limit of open files with ulimit -n"),
        (errno.ENFILE, "raise the limit of open files"),
        (errno.ENAMETOOLONG, "check the path"),
        (errno.ELOOP, "check the path"),
    ],
)
def test_limits_of_the_system_are_one_line(capsys, number, words):
    def body():
        raise OSError(number, "it failed", "/somewhere")

    assert guarded(body) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_a_run_that_cannot_be_deleted_is_a_run_error(tmp_path, monkeypatch):
    pytest.importorskip("streamlit")
    from spreeze.dashboard import control

    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(Path(path) / "logs"))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(SpreezeError, match=r"run could not be deleted: .*Permission denied"):
        control.delete(run, tmp_path)
