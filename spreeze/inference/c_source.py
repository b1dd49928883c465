"""A policy's list of operations as one C99 header, for microcontrollers and programs without Python.

The header holds the weights as constants, and ``NAME_act``, which allocates nothing, keeps no state and needs no
library. Exponentials are computed in the header (relative error below 1e-6), so that loops over them are vectorized.
With ``int8`` each column of a matrix is stored in units of its largest magnitude over 127; sums stay float.

To add an operation, write its C function in ``_FUNCTIONS`` and its call in ``_Source``.
"""

from __future__ import annotations

import ctypes
import json
import math
import re
import shutil
import subprocess
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from spreeze.errors import ConfigError
from spreeze.inference.recurrence import CELLS

if TYPE_CHECKING:
    from spreeze.inference.policy_formats import Operation

COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=c99", "-O3", "-Wall", "-Wextra", "-Werror")
"""Compiler flags for checking a header; a program that uses it may have any."""
_TIMEOUT_S = 120.0
_KEYWORDS = (
    "auto break case char const continue default do double else enum extern float for goto if inline int long main "
    "register restrict return short signed sizeof static struct switch typedef union unsigned void volatile while"
)
"""Reserved words of C."""

_FUNCTIONS = {
    "exp": """
        static inline float P_exp(float x) {
            union { int32_t i; float f; } power;
            x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
            const int32_t k = (int32_t)(x * 1.44269504f + (x < 0.0f ? -0.5f : 0.5f));
            const float r = (x - (float)k * 0.693359375f) + (float)k * 2.12194440e-4f;
            power.i = (k + 127) * 8388608;
            return power.f * (1.0f + r * (1.0f + r * (0.5f + r * (0.166666667f + r * (4.16666667e-2f
                + r * (8.33333333e-3f + r * (1.38888889e-3f + r * 1.98412698e-4f)))))));
        }""",
    "tanh1": """
        static inline float P_tanh1(float x) {
            return 1.0f - 2.0f / (P_exp(2.0f * x) + 1.0f);
        }""",
    "layer_norm": """
        static inline void P_layer_norm(float *x, int rows, int n) {
            for (int r = 0; r < rows; r++, x += n) {
                float mean = 0.0f, square = 0.0f;
                for (int i = 0; i < n; i++) mean += x[i] / (float)n;
                for (int i = 0; i < n; i++) square += (x[i] - mean) * (x[i] - mean) / (float)n;
                const float scale = 1.0f / sqrtf(square + 1e-5f);
                for (int i = 0; i < n; i++) x[i] = (x[i] - mean) * scale;
            }
        }""",
    "normalize": """
        static inline void P_normalize(float *x, int n, const float *mean, const float *std) {
            for (int i = 0; i < n; i++) x[i] = (x[i] - mean[i]) / std[i];
        }""",
    "clip": """
        static inline void P_clip(float *x, int n, const float *low, const float *high, int size) {
            for (; n > 0; n -= size, x += size)
                for (int i = 0; i < size; i++) x[i] = x[i] < low[i] ? low[i] : x[i] > high[i] ? high[i] : x[i];
        }""",
    "matmul": """
        static inline void P_matmul(const float *x, int rows, int in, const T *w, int out, float *y) {
            for (int r = 0; r < rows; r++, x += in, y += out) {
                const T *row = w;
                for (int j = 0; j < out; j++) y[j] = 0.0f;
                for (int i = 0; i < in; i++, row += out)
                    for (int j = 0; j < out; j++) y[j] += x[i] * (float)row[j];
            }
        }""",
    "conv": """
        static inline void P_conv(const float *x, int channels, int height, int width, const T *w, int size, int stride,
                                  int out, float *y) {
            const int rows = (height - size) / stride + 1, columns = (width - size) / stride + 1;
            for (int o = 0; o < out; o++)
                for (int i = 0; i < rows; i++)
                    for (int j = 0; j < columns; j++) {
                        float sum = 0.0f;
                        for (int c = 0; c < channels; c++)
                            for (int p = 0; p < size; p++)
                                for (int q = 0; q < size; q++)
                                    sum += x[(c * height + i * stride + p) * width + j * stride + q]
                                        * (float)w[((o * channels + c) * size + p) * size + q];
                        y[(o * rows + i) * columns + j] = sum;
                    }
        }""",
    "lstm": """
        static inline void P_lstm(const float *sums, int n, float *state) {
            for (int i = 0; i < n; i++) {
                const float keep = (P_tanh1(sums[i]) + 1.0f) * 0.5f, forget = (P_tanh1(sums[n + i]) + 1.0f) * 0.5f;
                const float give = (P_tanh1(sums[2 * n + i]) + 1.0f) * 0.5f;
                state[n + i] = forget * state[n + i] + keep * P_tanh1(sums[3 * n + i]);
                state[i] = give * P_tanh1(state[n + i]);
            }
        }""",
    "gru": """
        static inline void P_gru(const float *sums, int n, float *state) {
            for (int i = 0; i < n; i++) {
                const float reset = (P_tanh1(sums[i]) + 1.0f) * 0.5f, keep = (P_tanh1(sums[n + i]) + 1.0f) * 0.5f;
                const float fresh = P_tanh1(sums[2 * n + i] + reset * sums[3 * n + i]);
                state[i] = fresh + keep * (state[i] - fresh);
            }
        }""",
    "mask": """
        static inline void P_mask(float *x, const float *mask, int n) {
            for (int i = 0; i < n; i++) x[i] = mask[i] == 0.0f ? -3.402823466e38f : x[i];
        }""",
    "expected": """
        static inline void P_expected(const float *x, int actions, int n, const float *returns, float *y) {
            for (int k = 0; k < actions; k++, x += n) {
                float most = x[0], total = 0.0f, sum = 0.0f;
                for (int i = 1; i < n; i++) most = x[i] > most ? x[i] : most;
                for (int i = 0; i < n; i++) {
                    const float share = P_exp(x[i] - most);
                    total += share;
                    sum += share * returns[i];
                }
                y[k] = sum / total;
            }
        }""",
    "best": """
        static inline int32_t P_best(const float *x, int n) {
            int best = 0;
            for (int i = 1; i < n; i++) best = x[i] > x[best] ? i : best;
            return best;
        }""",
}
_ELEMENTWISE = """
        static inline void P_{0}(float *x, int n) {{
            for (int i = 0; i < n; i++) x[i] = {1};
        }}"""
_REPEATED = """
        static inline void P_{0}(float *x, int n, const float *b, int size) {{
            for (; n > 0; n -= size, x += size)
                for (int i = 0; i < size; i++) x[i] {1}= b[i];
        }}"""
_BY_CHANNEL = """
        static inline void P_channel_{0}(float *x, int channels, int size, const float *b) {{
            for (int c = 0; c < channels; c++)
                for (int i = 0; i < size; i++) *x++ {1}= b[c];
        }}"""
_ACTIVATIONS = {
    "tanh": "P_tanh1(x[i])",
    "relu": "x[i] < 0.0f ? 0.0f : x[i]",
    "silu": "x[i] * (P_tanh1(0.5f * x[i]) + 1.0f) * 0.5f",
    "gelu": "x[i] * (P_tanh1(0.7978845608f * (x[i] + 0.044715f * x[i] * x[i] * x[i])) + 1.0f) * 0.5f",
    "elu": "x[i] > 0.0f ? x[i] : P_exp(x[i]) - 1.0f",
}
_FUNCTIONS |= {name: _ELEMENTWISE.format(name, value) for name, value in _ACTIVATIONS.items()}
for _name, _operator in (("add", "+"), ("multiply", "*")):
    _FUNCTIONS[_name] = _REPEATED.format(_name, _operator)
    _FUNCTIONS[f"channel_{_name}"] = _BY_CHANNEL.format(_name, _operator)
_NEEDS = {"tanh1": ("exp",), "tanh": ("tanh1",), "silu": ("tanh1",), "gelu": ("tanh1",), "elu": ("exp",),
          "lstm": ("tanh1",), "gru": ("tanh1",), "expected": ("exp",)}  # fmt: skip


def c_name(stem: str) -> str:
    """A C identifier for a file's stem: ``walker-2`` gives ``walker_2``."""
    name = re.sub(r"\W", "_", stem, flags=re.ASCII) or "policy"
    return f"policy_{name}" if name[0].isdigit() or name in _KEYWORDS.split() or name.startswith("_") else name


def comment(text: str) -> str:
    """The text, escaped so that it cannot end the comment that contains it."""
    return re.sub(r"[^ -~]|[\\\\?]", " ", text).replace("*/", "* /").replace("/*", "/ *")


class _Source:
    """The body of ``NAME_act``, built by one call per operation, with the constants and functions that it needs."""

    def __init__(self, name: str, obs: np.ndarray, state_dim: int, *, int8: bool) -> None:
        self._name, self._int8, self._state_dim = name, int8, state_dim
        self._shape: tuple[int, ...] = obs.shape
        self._x, self._constants, self._body = "obs", list[str](), list[str]()
        self._used: dict[str, None] = {}
        self._kept = list[tuple[str, int]]()
        self._obs_size = obs.size
        self._arrays = self._stack_floats = 0

    def emit(self, operation: Operation) -> None:
        kind, values = operation
        call: Callable[..., None] | None = getattr(self, f"_{kind}", None)
        if call is not None:
            call(*values)
        elif kind in CELLS:
            self._cell(kind, *values)
        elif kind in _FUNCTIONS:  # in place
            x, size = self._writable(), self._size
            sizes = [np.size(values[0])] if kind in ("add", "multiply", "clip") else []  # shorter than x: repeated
            self._call(kind, x, size, *map(self._constant, values), *sizes)
        else:
            raise ConfigError(
                f"--format c: this policy has the operation {kind!r}, which has no C yet; use another format"
            )

    @property
    def _size(self) -> int:
        return math.prod(self._shape)

    def _constant(self, values: np.ndarray, kind: str = "float") -> str:
        self._arrays += 1
        name = f"{self._name}_c{self._arrays}"
        flat = np.ravel(np.asarray(values, np.float32) if kind == "float" else values).tolist()
        if kind == "float":
            flat = ["-3.402823466e38f" if value == -math.inf else _float(value) for value in flat]
        lines = textwrap.fill(", ".join(map(str, flat)), 116, initial_indent="    ", subsequent_indent="    ")
        self._constants.append(f"static const {kind} {name}[{len(flat)}] = {{\n{lines}\n}};")
        return name

    def _call(self, function: str, *arguments: object) -> None:
        for needed in (*_NEEDS.get(function, ()), function):
            for first in _NEEDS.get(needed, ()):
                self._used[first] = None
            self._used[needed] = None
        self._body.append(f"{self._name}_{function}({', '.join(map(str, arguments))});")

    def _new(self, shape: Sequence[int]) -> str:
        """Declares an array for the next x and makes it the current one."""
        self._shape = tuple(int(size) for size in shape)
        self._x = f"x{len(self._body)}"
        self._stack_floats += self._size
        self._body.append(f"float {self._x}[{self._size}];")
        return self._x

    def _writable(self) -> str:
        """The current x; a copy if it is still the caller's observation."""
        if self._x == "obs":
            self._new(self._shape)
            self._body.append(f"for (int i = 0; i < {self._size}; i++) {self._x}[i] = obs[i];")
        return self._x

    def _weights(self, weight: np.ndarray, axis: int) -> tuple[str, np.ndarray | None]:
        """Name of a constant matrix; with int8 also the scale of each output, along ``axis``."""
        if not self._int8:
            return self._constant(weight), None
        unit = np.abs(weight).max(tuple(k for k in range(weight.ndim) if k != axis), keepdims=True) / np.float32(127.0)
        unit[unit == 0.0] = 1.0
        return self._constant(np.rint(weight / unit).astype(np.int8), "int8_t"), np.ravel(unit)

    # --- one method for each operation with constants or another shape ---

    def _stack(self, shape: np.ndarray) -> None:
        self._writable()
        self._shape = tuple(int(size) for size in shape[1:])

    def _conv(self, weight: np.ndarray, bias: np.ndarray, stride: np.ndarray) -> None:
        (channels, height, width), x = self._shape, self._x
        (out, _, size, _), step = weight.shape, int(stride)
        name, unit = self._weights(weight, 0)
        y = self._new((out, (height - size) // step + 1, (width - size) // step + 1))
        self._call("conv", x, channels, height, width, name, size, step, out, y)
        if unit is not None:
            self._call("channel_multiply", y, out, self._size // out, self._constant(unit))
        self._call("channel_add", y, out, self._size // out, self._constant(bias))

    def _part(self, columns: np.ndarray, shape: np.ndarray) -> None:
        y = self._new(shape[1:].tolist())
        self._body.append(f"for (int i = 0; i < {self._size}; i++) {y}[i] = obs[{int(columns[0])} + i];")

    def _keep(self) -> None:
        self._kept.append((self._x, self._size))

    def _join(self) -> None:
        y, end = self._new((sum(size for _, size in self._kept),)), 0
        for x, size in self._kept:
            self._body.append(f"for (int i = 0; i < {size}; i++) {y}[{end} + i] = {x}[i];")
            end += size

    def _flatten(self) -> None:
        (channels, height, width), x = self._shape, self._x
        y = self._new((height * width * channels,))
        self._body.append(
            f"for (int c = 0; c < {channels}; c++) for (int i = 0; i < {height * width}; i++) "
            f"{y}[i * {channels} + c] = {x}[c * {height * width} + i];"
        )

    def _matmul(self, weight: np.ndarray) -> None:
        x, shape = self._x, self._shape
        name, unit = self._weights(weight, 1)
        y = self._new((*shape[:-1], weight.shape[1]))
        self._call("matmul", x, math.prod(shape[:-1]), shape[-1], name, weight.shape[1], y)
        if unit is not None:
            self._call("multiply", y, self._size, self._constant(unit), len(unit))

    def _layer_norm(self) -> None:
        self._call("layer_norm", self._x, math.prod(self._shape[:-1]), self._shape[-1])

    def _team(self, shape: np.ndarray) -> None:
        self._shape = tuple(int(size) for size in shape)  # the first values of the observation

    def _columns(self, count: np.ndarray) -> None:
        self._shape = (int(count),)

    def _mask(self, count: np.ndarray, begin: np.ndarray | int = 0) -> None:
        self._call("mask", f"{self._x} + {int(begin)}", f"obs + {self._obs_size - int(count)}", int(count))

    def _squash(self, count: np.ndarray) -> None:
        self._call("tanh", self._writable(), int(count))

    def _choose(self, count: np.ndarray, columns: np.ndarray, unused: np.ndarray) -> None:
        x, continuous = self._x, int(count)
        starts, sizes = (self._constant(part, "int32_t") for part in (columns[:, 0], (unused == 0.0).sum(1)))
        y = self._new((continuous + len(columns),))
        self._used["best"] = None
        self._body += [
            f"for (int i = 0; i < {continuous}; i++) {y}[i] = {x}[i];",
            f"for (int r = 0; r < {len(columns)}; r++) "
            f"{y}[{continuous} + r] = (float){self._name}_best({x} + {starts}[r], {sizes}[r]);",
        ]

    def _expected(self, returns: np.ndarray) -> None:
        x, actions = self._x, self._size // len(returns)
        y = self._new((actions,))
        self._call("expected", x, actions, len(returns), self._constant(returns), y)

    def _gather(self, columns: np.ndarray) -> None:
        x, name = self._x, self._constant(columns, "int32_t")
        y = self._new(columns.shape)
        self._body.append(f"for (int i = 0; i < {self._size}; i++) {y}[i] = {x}[{name}[i]];")

    def _argmax(self, first: np.ndarray) -> None:
        rows, n = math.prod(self._shape[:-1]), self._shape[-1]
        start = self._constant(np.broadcast_to(np.ravel(first), rows), "int32_t")
        self._used["best"] = None
        self._body.append(
            f"for (int r = 0; r < {rows}; r++) action[r] = {self._name}_best({self._x} + r * {n}, {n}) + {start}[r];"
        )
        self._shape, self._x = (rows,), "action"

    def _cell(self, kind: str, weight: np.ndarray, bias: np.ndarray) -> None:
        size, inputs, x = weight.shape[1] // 4, self._shape[-1], self._x
        joined = self._new((len(weight),))
        self._body.append(f"for (int i = 0; i < {inputs}; i++) {joined}[i] = {x}[i];")
        self._body.append(f"for (int i = 0; i < {size}; i++) {joined}[{inputs} + i] = state[i];")
        self._matmul(weight)
        self._call("add", self._x, self._size, self._constant(bias), len(bias))
        self._call(kind, self._x, size, "state")
        self._x, self._shape = "state", (size,)

    def text(self, about: dict[str, Any], obs_type: str, action_type: str) -> str:
        if action_type == "float":
            self._body.append(f"for (int i = 0; i < {self._size}; i++) action[i] = {self._x}[i];")
        name, guard = self._name, f"{self._name.upper()}_H"
        state = f"float state[{self._state_dim}], " if self._state_dim else ""
        functions = [
            textwrap.dedent(_FUNCTIONS[kind]).replace("P_", f"{name}_")
            .replace("const T ", f"const {'int8_t' if self._int8 else 'float'} ")
            for kind in self._used
        ]  # fmt: skip
        lines = [f" * {key}: {comment(str(value))}" for key, value in about.items()]
        unit = "in the environment's unit" if action_type == "float" else "as the environment numbers them"
        use = [
            f" * {name}_act() writes the greedy action {unit}; it uses {4 * self._stack_floats:,} bytes of stack.",
            *([f" * Set the {self._state_dim} values of state to 0 where an episode begins."] if state else []),
        ]
        return "\n".join(
            [
                "/* A policy trained by Spreeze, C99, without allocation.", *lines, *use, " */",
                f"#ifndef {guard}", f"#define {guard}", "#include <stdint.h>",
                *(["#include <math.h>"] if "layer_norm" in self._used else []), "",
                f"#define {name.upper()}_OBS {self._obs_size}",
                f"#define {name.upper()}_ACTIONS {self._size}",
                f"#define {name.upper()}_STATE {self._state_dim}", "",
                *self._constants, *functions, "",
                f"static inline void {name}_act(const {obs_type} obs[{self._obs_size}], {state}"
                f"{action_type} action[{self._size}]) {{",
                *(f"    {line}" for line in self._body), "}", "", "#endif", "",
            ]
        )  # fmt: skip


def _float(value: float) -> str:
    text = f"{value:.9g}"
    return f"{text}f" if "." in text or "e" in text else f"{text}.0f"


def header(
    steps: list[Operation], obs: np.ndarray, state_dim: int, about: dict[str, Any], name: str, *, int8: bool = False
) -> str:
    """The C header of a policy; a ConfigError if an operation has no C version.

    Args:
        steps: the policy's operations.
        obs: one observation, for its shape and type.
        state_dim: values of the policy's state; 0 without memory.
        about: lines of the comment at its top.
        name: prefix of all definitions of the header; a C identifier.
        int8: store matrices in eight bits.
    """
    source = _Source(name, obs, state_dim, int8=int8)
    for step in steps:
        source.emit(step)
    obs_type = "uint8_t" if obs.dtype == np.uint8 else "float"
    return source.text(about, obs_type, "int32_t" if steps[-1].kind == "argmax" else "float")


def compiler() -> str | None:
    """Path of a C compiler; None: none was found."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def open_header(path: Path) -> Callable[[np.ndarray, tuple[np.ndarray, ...]], Any]:
    """Compiles a header and returns its policy: from observations [N, ...] and state to actions [N, A] and next state.

    A ConfigError if there is no compiler, or it rejects the header.
    """
    path_of_compiler = compiler()
    if path_of_compiler is None:
        raise ConfigError(f"a C compiler is needed: install one of {', '.join(COMPILERS)}")
    text = path.read_text()
    declared = re.search(r"void (\w+)_act\(const (\w+) obs\[\d+\], (float state\[)?.*?(\w+) action\[(\d+)\]", text)
    if declared is None:
        raise ConfigError(f"{path}: not a header of a policy")
    name, obs_type, stateful, action_type, actions = declared.groups()
    action_line = re.search(r"^ \* action: (\[.*\])$", text, re.MULTILINE)
    shape = json.loads(action_line[1]) if action_line else [int(actions)]
    big = name.upper()
    program = f"""#include "{path.resolve()}"
void act_rows(int rows, const {obs_type} *obs, float *state, {action_type} *action);
void act_rows(int rows, const {obs_type} *obs, float *state, {action_type} *action) {{
    (void)state;
    for (int r = 0; r < rows; r++)
        {name}_act(obs + r * {big}_OBS, {f"state + r * {big}_STATE, " if stateful else ""}action + r * {big}_ACTIONS);
}}
"""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "policy.so")
        command = [path_of_compiler, *FLAGS, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-lm"]
        result = subprocess.run(command, input=program, capture_output=True, text=True, timeout=_TIMEOUT_S)
        if result.returncode:
            raise ConfigError(f"{path_of_compiler} rejects the header: {result.stderr.strip()[:500]}")
        act_rows = ctypes.CDLL(str(library)).act_rows

    def act(obs: np.ndarray, state: tuple[np.ndarray, ...]) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
        obs = np.ascontiguousarray(obs)
        next_state = tuple(part.copy() for part in state)
        action = np.empty((len(obs), int(actions)), np.int32 if action_type == "int32_t" else np.float32)
        pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (obs, *(next_state or (action,)), action)]
        act_rows(len(obs), *pointers)
        action = action.reshape(len(obs), *shape)
        return (action.astype(np.int64) if action.dtype == np.int32 else action), next_state

    return act
