"""A policy as a short list of operations, and that list as an ONNX, PyTorch, NumPy or C file.

Each file takes observations like ``Policy``, float32 [N, O] or images uint8 [N, k, C, H, W], and returns greedy actions
for ``env.step``: float32 [N, A] within the bounds, or the environment's own numbers, int64 [N] for Discrete and [N,
*shape] for MultiDiscrete and MultiBinary; for a team of n agents int64 [N, n], one index each. Actions of Dict and
Tuple spaces are one row, from which the example builds the structure: float32 [N, A], the numbers of all boxes and then
the index of each choice; int64 if all are choices. Normalizer, squashing and action scaling are included; Spreeze is
not needed. A policy with memory also takes and returns its state, float32 [N, S], zero at the start of an episode.

To add a format, write a ``PolicyFormat`` (types.py) and a row of ``_CODECS``; to add an operation, a row for it in each
of the two tables, and in ``c_source``.
"""

from __future__ import annotations

import ast
import functools
import inspect
import io
import json
import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from spreeze.errors import ConfigError
from spreeze.inference import c_source
from spreeze.inference.convolution import CNNS, TrunkInputs
from spreeze.inference.heads import FORBIDDEN, head_of
from spreeze.inference.normalizer import OBS_CLIP
from spreeze.inference.policy import ACTIVATIONS, NORM_EPS, Policy, State
from spreeze.inference.recurrence import CELLS, Cell
from spreeze.types import Arrays, Choices, EnvSpec

_N = TypeVar("_N", bound=ast.AST)
Act = Callable[[np.ndarray, State], tuple[np.ndarray, State]]
"""Maps observations [N, ...] and state to greedy actions in the environment's own unit and the next state."""
_OPSET = 17  # ONNX Runtime 1.14 reads it, of February 2023


class Operation(NamedTuple):
    """One step from x [N, ...] to the next x, and its constant arrays."""

    kind: str
    values: tuple[np.ndarray, ...] = ()


# --- the list ---


def operations(arrays: Arrays, meta: dict[str, Any], spec: EnvSpec) -> list[Operation]:
    """The operations of the greedy policy that the weights describe, up to actions for ``env.step``.

    A WeightsError if a part is missing or does not fit, a ConfigError if the network is a custom module.
    """
    if "network" in meta:
        raise ConfigError(
            f"this policy is the custom network {meta['network']!r} of {spec.import_module}, whose computation is "
            "not in the weights; export the module with torch.onnx or torch.export"
        )
    Policy.from_weights(arrays, meta)  # checks names and shapes
    hidden, head = len(meta.get("hidden_sizes", ())), head_of(meta, arrays)
    activation = str(meta.get("activation", ACTIVATIONS[0]))
    steps = _trunks(arrays, meta) if "cnn" in meta else _normalizer(arrays)
    if spec.team is not None:
        steps.append(Operation("team", (_i64([spec.team.size, spec.team.obs_dim]),)))
    if "recurrent" in meta:
        cell = Cell(arrays, meta)
        steps.append(Operation(cell.kind, (cell.weight[:-1], cell.weight[-1])))
    continuous = 0 if spec.box is None or spec.choices is None else spec.box.dim
    weights = [arrays[f"w{index}"] for index in range(hidden)] + [arrays["head_w"]]
    head_b = arrays["head_b"]
    if meta["policy"] == "squashed_mixed":  # without the log standard deviations
        deviations = slice(continuous, 2 * continuous)
        weights[-1], head_b = np.delete(weights[-1], deviations, 1), np.delete(head_b, deviations)
    for index, weight in enumerate(weights):
        steps += _matmul(weight, spec if index == 0 else None)
        if index == hidden:
            break
        if meta.get("layer_norm"):
            steps.append(Operation("layer_norm"))
        steps += [Operation("add", (_f32(arrays[f"b{index}"]),)), Operation(activation)]
    steps.append(Operation("add", (_f32(head_b),)))
    if "atoms" in arrays:
        steps.append(Operation("expected", (_f32(arrays["atoms"]),)))
    if spec.team is not None and spec.choices is not None and len(set(spec.choices.nvec)) > 1:
        steps.append(Operation("add", (_unused(spec.choices),)))
    if meta.get("action_mask"):
        steps.append(Operation("mask", (_i64(head.options), *([_i64(continuous)] if continuous else []))))
    return steps + _HEADS[str(meta["policy"])](spec)


def _matmul(weight: np.ndarray, first: EnvSpec | None) -> list[Operation]:
    """A layer's matmul; for the one-hot numbers of a team's agents, the ``first`` layer adds their weights instead."""
    if first is None or first.team is None:
        return [Operation("matmul", (_f32(weight),))]
    size = first.team.obs_dim
    return [Operation("matmul", (_f32(weight[:size]),)), Operation("add", (_f32(weight[size:]),))]


def _normalizer(arrays: Arrays) -> list[Operation]:
    if "obs_mean" not in arrays:
        return []
    mean, std = _f32(arrays["obs_mean"]), _f32(arrays["obs_std"])
    return [Operation("normalize", (mean, std)), Operation("clip", (_f32(-OBS_CLIP), _f32(OBS_CLIP)))]


def _trunks(arrays: Arrays, meta: dict[str, Any]) -> list[Operation]:
    """Maps the result of ``file_input`` to features [N, F + V], those of an image ordered by row, column, channel."""
    inputs, layers = TrunkInputs.from_meta(meta), CNNS[meta["cnn"]]
    is_single = len(inputs.images) == 1 and not inputs.vector_dim
    steps, end = [], 0
    for number, image in enumerate(inputs.images):
        begin, end = end, end + math.prod(image)
        shape = _i64([-1, *image])
        steps.append(Operation("stack", (shape,)) if is_single else Operation("part", (_i64([begin, end]), shape)))
        for index, layer in enumerate(layers):
            name = f"conv{number * len(layers) + index}"
            weight = _f32(arrays[f"{name}_w"]) / np.float32(255.0 if index == 0 else 1.0)
            steps += [Operation("conv", (weight, _f32(arrays[f"{name}_b"]), _i64(layer.stride))), Operation("relu")]
        steps += [Operation("flatten"), *([] if is_single else [Operation("keep")])]
    if inputs.vector_dim:
        columns = _i64([end, end + inputs.vector_dim])
        steps += [Operation("part", (columns, _i64([-1, inputs.vector_dim]))), *_normalizer(arrays), Operation("keep")]
    return steps if is_single else [*steps, Operation("join")]


def file_input(spec: EnvSpec, obs: np.ndarray) -> np.ndarray:
    """Observations in the input format of an exported file: that of our policy, except for images beside other parts.

    Those become rows of float32: pixels (0 to 255) image by image, each over the last k frames, then the newest
    numbers.
    """
    if spec.frames is None or spec.frames.is_single:
        return obs
    images, _ = TrunkInputs.of(spec.frames).split(obs)
    pixels = [image.reshape(len(obs), -1).astype(np.float32) for image in images]
    return np.concatenate([*pixels, spec.frames.numbers(obs)], 1)


def _squashed(spec: EnvSpec) -> list[Operation]:
    return [Operation("columns", (_i64(spec.action_dim),)), Operation("tanh"), *_scaling(spec)]


def _clipped(spec: EnvSpec) -> list[Operation]:
    return [Operation("clip", (_f32(-1.0), _f32(1.0))), *_scaling(spec)]


def _scaling(spec: EnvSpec) -> list[Operation]:
    """Scales actions like ``envs.task.ActionScaling``; the indices after them are unchanged."""
    assert spec.box is not None
    low, high = spec.box.float32_bounds()
    half, middle = spec.box.half_and_middle()
    ends = _f32(spec.choices.nvec if spec.choices else ()) - np.float32(1.0)
    half, middle = np.concatenate((half, ends * 0 + 1)), np.concatenate((middle, ends * 0))
    bounds = np.concatenate((low, ends * 0)), np.concatenate((high, ends))
    return [Operation("multiply", (half,)), Operation("add", (middle,)), Operation("clip", bounds)]


def _best(spec: EnvSpec) -> list[Operation]:
    choice = spec.choices
    assert choice is not None
    alike = len(set(choice.start)) == 1
    best = Operation("argmax", (_i64(choice.start[0]) if alike else _i64(choice.start).reshape(choice.shape),))
    if spec.team is not None or not choice.shape:
        return [best]
    steps = [Operation("gather", (_options(choice).reshape(*choice.shape, -1),))]
    if len(set(choice.nvec)) > 1:
        steps.append(Operation("add", (_unused(choice).reshape(*choice.shape, -1),)))
    return [*steps, best]


def _options(choice: Choices) -> np.ndarray:
    """Columns int64 [A, largest n] of each choice's options; a choice with fewer options repeats its last one."""
    index, parts = np.arange(max(choice.nvec)), zip(choice.slices, choice.nvec, strict=True)
    return _i64([part.start + np.minimum(index, count - 1) for part, count in parts])


def _mixed(spec: EnvSpec, *, squashed: bool) -> list[Operation]:
    assert spec.box is not None
    assert spec.choices is not None
    continuous, unbounded = spec.box.dim, np.finfo(np.float32).max
    clips = np.repeat(_f32([1.0, unbounded]), [continuous, spec.choices.options])
    first = Operation("squash", (_i64(continuous),)) if squashed else Operation("clip", (-clips, clips))
    columns = continuous + _options(spec.choices)
    return [first, Operation("choose", (_i64(continuous), columns, _unused(spec.choices))), *_scaling(spec)]


def _unused(choice: Choices) -> np.ndarray:
    """Offsets of logits [A, largest n]: ``FORBIDDEN`` for options that a choice does not have, else 0."""
    has = np.arange(max(choice.nvec)) < np.array(choice.nvec)[:, None]
    return np.where(has, np.float32(0.0), np.float32(FORBIDDEN))


_HEADS: dict[str, Callable[[EnvSpec], list[Operation]]] = {
    "squashed_gaussian": _squashed, "deterministic": _squashed, "gaussian": _clipped, "q_values": _best,
    "categorical": _best, "mixed": functools.partial(_mixed, squashed=False),
    "squashed_mixed": functools.partial(_mixed, squashed=True),
}  # fmt: skip
"""Kinds of policies, as in ``heads._HEADS``."""


def state_dim(steps: list[Operation]) -> int:
    """S: values of the policy's state; 0 without memory."""
    return sum(CELLS[kind] * values[0].shape[1] // 4 for kind, values in steps if kind in CELLS)


def _f32(values: Any) -> np.ndarray:
    return np.asarray(values, np.float32)


def _i64(values: Any) -> np.ndarray:
    return np.asarray(values, np.int64)


# --- NumPy ---


def run(policy: Mapping[str, np.ndarray], obs: np.ndarray, more: Any = ()) -> np.ndarray:
    """Greedy actions for observations ``obs`` [N, ...]; ``policy`` holds the arrays of the exported file."""
    kept: list[np.ndarray] = []

    def conv(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, stride: np.ndarray) -> np.ndarray:
        patches = np.lib.stride_tricks.sliding_window_view(x, weight.shape[2:], (2, 3))[:, :, ::stride, ::stride]
        return np.moveaxis(np.tensordot(patches, weight, ((1, 4, 5), (1, 2, 3))) + bias, 3, 1)

    def expected(x: np.ndarray, returns: np.ndarray) -> Any:
        x = x.reshape(len(x), -1, len(returns))
        shares = np.exp(x - x.max(-1, keepdims=True))
        return shares @ returns / shares.sum(-1)

    kinds: Mapping[str, Callable[..., Any]] = {
        "stack": lambda x, shape: x.reshape(shape).astype(np.float32),
        "part": lambda x, place, shape: obs[:, place[0] : place[1]].reshape(shape),
        "keep": lambda x: kept.append(x),  # the next step does not read x
        "join": lambda x: np.concatenate(kept, 1),
        "conv": conv,
        "flatten": lambda x: np.moveaxis(x, 1, 3).reshape(len(x), -1),
        "normalize": lambda x, mean, std: (x - mean) / std,
        "clip": np.clip,
        "matmul": np.matmul,
        "add": np.add,
        "multiply": np.multiply,
        "tanh": np.tanh,
        "team": lambda x, shape: x[:, : shape.prod()].reshape(-1, *shape),
        "layer_norm": lambda x: (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5),
        "relu": lambda x: np.maximum(x, 0),
        "silu": lambda x: x * (np.tanh(x / 2) + 1) / 2,
        "gelu": lambda x: x * (np.tanh(0.7978845608 * (x + 0.044715 * x * x * x)) + 1) / 2,
        "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
        "columns": lambda x, count: x[:, :count],
        "expected": expected,
        "mask": lambda x, n, at=0: np.hstack((x[:, :at], np.where(obs[:, -n:] == 0, -np.inf, x[:, at:]))),
        "squash": lambda x, n: np.hstack((np.tanh(x[:, :n]), x[:, n:])),
        "choose": lambda x, n, at, unused: np.hstack((x[:, :n], (x[:, at] + unused).argmax(-1).astype(np.float32))),
        "gather": lambda x, columns: x[:, columns],
        "argmax": lambda x, first: x.argmax(-1) + first,
    }
    x = obs
    for place, kind in enumerate(policy["operations"]):
        x = {**kinds, **dict(more)}[str(kind)](
            x, *(policy[f"{place}.{k}"] for k in range(3) if f"{place}.{k}" in policy)
        )
    return x


def run_with_state(policy: Mapping[str, np.ndarray], obs: np.ndarray, state: np.ndarray) -> Any:
    """Runs a policy with memory by its state [N, S], zeros where episodes begin; returns actions and the next state."""
    following = []

    def sums_of(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> Any:
        return np.split(np.concatenate((x, state[:, : len(weight) - x.shape[1]]), 1) @ weight + bias, 4, 1)

    def lstm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> Any:
        sums = sums_of(x, weight, bias)
        keep, forget, give = [(np.tanh(part) + 1) / 2 for part in sums[:3]]
        c = forget * np.split(state, 2, 1)[1] + keep * np.tanh(sums[3])
        following.append(np.concatenate((give * np.tanh(c), c), 1))
        return give * np.tanh(c)

    def gru(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> Any:
        sums = sums_of(x, weight, bias)
        reset, keep = [(np.tanh(part) + 1) / 2 for part in sums[:2]]
        new = np.tanh(sums[2] + reset * sums[3])
        following.append(new + keep * (state - new))
        return following[0]

    return run(policy, obs, {"lstm": lstm, "gru": gru}), following[0]


def runner_source(*, with_state: bool) -> str:
    """The source of ``run``, and ``with_state`` of ``run_with_state``, without annotations; both need only NumPy."""
    return plain_source(run) + ("\n\n" + plain_source(run_with_state) if with_state else "")


def plain_source(function: Callable[..., Any]) -> str:
    """The source of a function without annotations."""
    lines = inspect.getsource(function).splitlines(keepends=True)
    tree = ast.parse("".join(lines))
    spans = [(node.lineno, node.col_offset + len(node.arg), node.annotation) for node in _nodes(tree, ast.arg)]
    spans += [(node.lineno, node.target.end_col_offset or 0, node.annotation) for node in _nodes(tree, ast.AnnAssign)]
    spans += [
        (node.returns.lineno, node.returns.col_offset - len(" -> "), node.returns)
        for node in _nodes(tree, ast.FunctionDef)
        if node.returns is not None
    ]
    for line, begin, annotation in sorted(spans, key=lambda span: span[:2], reverse=True):
        if annotation is not None:  # each is on one line
            text = lines[line - 1]
            lines[line - 1] = text[:begin] + text[annotation.end_col_offset :]
    return "".join(lines)


def _nodes(tree: ast.AST, kind: type[_N]) -> list[_N]:
    return [node for node in ast.walk(tree) if isinstance(node, kind)]


def numpy_arrays(steps: list[Operation]) -> Arrays:
    """The arrays of a NumPy file, for ``run``."""
    kinds = {"operations": np.array([step.kind for step in steps])}
    return kinds | {f"{index}.{k}": value for index, step in enumerate(steps) for k, value in enumerate(step.values)}


def _write_numpy(steps: list[Operation], spec: EnvSpec, about: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, about=np.array(json.dumps(about)), **numpy_arrays(steps))
    return buffer.getvalue()


def _open_numpy(path: Path) -> Act:
    with np.load(path) as file:
        policy = dict(file)

    def act(obs: np.ndarray, state: State) -> tuple[np.ndarray, State]:
        if not state:
            return run(policy, obs), ()
        action, following = run_with_state(policy, obs, *state)
        return action, (following,)

    return act


# --- PyTorch ---


def _module(steps: list[Operation]) -> Any:
    """A torch module from observations, and a state if there is one, to actions and the next state."""
    import torch
    from torch.nn import functional

    kinds: dict[str, Callable[..., Any]] = {
        "stack": lambda x, shape: x.flatten(1, 2).float(),
        "conv": lambda x, weight, bias, stride: functional.conv2d(x, weight, bias, stride),
        "flatten": lambda x: x.permute(0, 2, 3, 1).flatten(1),
        "normalize": lambda x, mean, std: (x - mean) / std,
        "clip": torch.clamp,
        "matmul": torch.matmul,
        "add": torch.add,
        "multiply": torch.mul,
        "tanh": torch.tanh,
        "layer_norm": lambda x: functional.layer_norm(x, (int(x.shape[-1]),), eps=NORM_EPS),
        "relu": torch.relu,
        "silu": functional.silu,
        "gelu": lambda x: functional.gelu(x, approximate="tanh"),
        "elu": functional.elu,
        "columns": lambda x, count: x[:, :count],
        "expected": lambda x, returns: x.unflatten(1, (-1, len(returns))).softmax(2) @ returns,
        "gather": lambda x, columns: x[:, torch.tensor(columns)],
        "argmax": lambda x, first: x.argmax(-1) + torch.tensor(first),
        "team": lambda x, shape: x[:, : shape[0] * shape[1]].unflatten(1, shape),
        "squash": lambda x, count: torch.cat((torch.tanh(x[:, :count]), x[:, count:]), 1),
        "choose": lambda x, count, columns, unused: torch.cat(
            (x[:, :count], (x[:, torch.tensor(columns)] + unused).argmax(-1).float()), 1
        ),
    }

    class Exported(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for index, step in enumerate(steps):
                for k, value in enumerate(step.values):
                    if value.dtype == np.float32:
                        self.register_buffer(f"a{index}_{k}", torch.from_numpy(value.copy()))

        def forward(self, obs: Any, *state: Any) -> Any:
            x, after, kept = obs, list[Any](), list[Any]()

            def mask(x: Any, count: int, at: int = 0) -> Any:
                masked = x[:, at:].masked_fill(obs[:, -count:] == 0.0, float("-inf"))
                return torch.cat((x[:, :at], masked), 1) if at else masked

            of_inputs: dict[str, Callable[..., Any]] = {
                "mask": mask,
                "part": lambda x, columns, shape: obs[:, columns[0] : columns[1]].unflatten(1, shape[1:]),
                "keep": lambda x: kept.append(x),
                "join": lambda x: torch.cat(kept, 1),
            }
            for index, (kind, values) in enumerate(steps):
                given = [
                    getattr(self, f"a{index}_{k}") if value.dtype == np.float32 else value.tolist()
                    for k, value in enumerate(values)
                ]
                if kind in CELLS:
                    x, *after = _torch_cell(kind, x, *state, *given)
                else:
                    x = (kinds | of_inputs)[kind](x, *given)
            return (x, *after) if after else x

    return Exported().eval()


def _examples(steps: list[Operation], spec: EnvSpec) -> tuple[Any, ...]:
    """Inputs of the module, for two observations."""
    import torch

    obs, state = file_input(spec, draw_obs(spec, {}, 2, seed=0)), draw_state(steps, 2, seed=0)
    return tuple(map(torch.from_numpy, (obs, *state)))


def _write_torch(steps: list[Operation], spec: EnvSpec, about: dict[str, Any]) -> bytes:
    import torch

    examples = _examples(steps, spec)
    batch = {0: torch.export.Dim("batch")}
    shapes: Any = (batch,) if len(examples) == 1 else (batch, (batch,))
    program = torch.export.export(_module(steps), examples, dynamic_shapes=shapes)
    program.example_inputs = None  # these alone would be pickled
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={"about.json": json.dumps(about)})
    return buffer.getvalue()


def _open_torch(path: Path) -> Act:
    import torch

    module = torch.export.load(path).module()

    def act(obs: np.ndarray, state: State) -> tuple[np.ndarray, State]:
        with torch.no_grad():
            outputs = module(*map(torch.from_numpy, (obs, *state)))
        action, *after = [part.numpy() for part in (outputs if isinstance(outputs, tuple) else (outputs,))]
        return action, tuple(after)

    return act


def _torch_cell(kind: str, x: Any, state: Any, weight: Any, bias: Any) -> tuple[Any, Any]:
    """Output and next state of a cell, equivalent to ``inference.recurrence.Cell``."""
    import torch

    size = weight.shape[1] // 4
    sums = (torch.cat((x, state[:, :size]), 1) @ weight + bias).split(size, 1)
    if kind == "gru":
        reset, keep = ((torch.tanh(part) + 1.0) / 2.0 for part in sums[:2])
        new = torch.tanh(sums[2] + reset * sums[3])
        h = new + keep * (state - new)
        return h, h
    keep, forget, give = ((torch.tanh(part) + 1.0) / 2.0 for part in sums[:3])
    c = forget * state[:, size:] + keep * torch.tanh(sums[3])
    h = give * torch.tanh(c)
    return h, torch.cat((h, c), 1)


# --- ONNX ---


def _write_onnx(steps: list[Operation], spec: EnvSpec, about: dict[str, Any]) -> bytes:
    import onnx
    import torch

    examples = _examples(steps, spec)
    buffer: Any = io.BytesIO()  # torch accepts it, although its type hints do not
    inputs, outputs = ["obs", "state"][: len(examples)], ["action", "next_state"][: len(examples)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this exporter is the older one; the other needs one more package
        torch.onnx.export(
            _module(steps),
            examples,
            buffer,
            input_names=inputs,
            output_names=outputs,
            dynamic_axes={name: {0: "batch"} for name in inputs + outputs},
            opset_version=_OPSET,
            dynamo=False,
        )
    model = onnx.load_from_string(buffer.getvalue())
    model.producer_name = "spreeze"
    onnx.helper.set_model_props(model, {name: str(value) for name, value in about.items()})
    onnx.checker.check_model(model, full_check=True)
    data: bytes = model.SerializeToString()
    return data


def _open_onnx(path: Path) -> Act:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def act(obs: np.ndarray, state: State) -> tuple[np.ndarray, State]:
        action, *after = session.run(None, dict(zip(("obs", "state"), (obs, *state), strict=False)))
        return action, tuple(after)

    return act


# --- files ---


class _Codec(NamedTuple):
    write: Callable[[list[Operation], EnvSpec, dict[str, Any]], bytes]
    open: Callable[[Path], Act]


def _write_c(steps: list[Operation], spec: EnvSpec, about: dict[str, Any], *, int8: bool) -> bytes:
    name = c_source.c_name(str(about.get("name", "policy")))
    about = about | {"action": list(spec.action.shape) if isinstance(spec.action, Choices) else [spec.action_dim]}
    obs = file_input(spec, draw_obs(spec, {}, 1, seed=0))[0]
    return c_source.header(steps, obs, state_dim(steps), about, name, int8=int8).encode()


_CODECS = {
    "onnx": _Codec(_write_onnx, _open_onnx), "torch": _Codec(_write_torch, _open_torch),
    "numpy": _Codec(_write_numpy, _open_numpy),
    "c": _Codec(functools.partial(_write_c, int8=False), c_source.open_header),
    "c-int8": _Codec(functools.partial(_write_c, int8=True), c_source.open_header),
}  # fmt: skip


def encode(name: str, steps: list[Operation], spec: EnvSpec, about: dict[str, Any]) -> bytes:
    """The bytes of a file of format ``name`` (see ``types.POLICY_FORMATS``); ``about`` is stored with it."""
    return _CODECS[name].write(steps, spec, about)


def open_policy(name: str, path: Path) -> Act:
    """Opens a file of format ``name`` with its own engine; returns a function that runs it."""
    return _CODECS[name].open(path)


# --- observations to try a file with ---


def draw_obs(spec: EnvSpec, arrays: Arrays, count: int, seed: int) -> np.ndarray:
    """Observations [count, ...], typical and extreme ones: with a normalizer, a third exceeds its clipping range."""
    rng = np.random.default_rng(seed)
    if spec.frames is not None:
        frames = rng.integers(0, 256, (count, spec.frames.stack, *spec.frames.shape), dtype=np.uint8)
        if spec.vector_dim:
            frames[:, -1, -4 * spec.vector_dim :] = _draw_numbers(spec, arrays, count, rng).view(np.uint8)
        return frames
    return _draw_numbers(spec, arrays, count, rng)


def _draw_numbers(spec: EnvSpec, arrays: Arrays, count: int, rng: np.random.Generator) -> np.ndarray:
    obs = rng.standard_normal((count, spec.vector_dim), np.float32)
    if "obs_mean" in arrays:
        obs *= np.array([1.0, 4.0, 20.0], np.float32)[np.arange(count) % 3, None]
        obs = obs * arrays["obs_std"] + arrays["obs_mean"]
    if spec.mask_dim and spec.choices is not None:
        mask = rng.random((count, spec.mask_dim)) < 0.5
        for part in spec.choices.slices:  # each choice has an option
            mask[np.arange(count), rng.integers(part.start, part.stop, size=count)] = True
        obs[:, -spec.mask_dim :] = mask
    return obs.astype(np.float32)


def draw_state(steps: list[Operation], count: int, seed: int) -> State:
    """States of a policy with memory in the middle of ``count`` episodes; empty for one without."""
    width = state_dim(steps)
    return (np.random.default_rng(seed).uniform(-1.0, 1.0, (count, width)).astype(np.float32),) if width else ()
