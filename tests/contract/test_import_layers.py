"""The import graph: one direction, heavy packages only where they belong, nothing done at import."""

import ast
import json
import subprocess
import sys

import pytest
from harness import PATIENCE_S
from sources import FILES, nodes, relative
from sources import PACKAGE as ROOT

LAYERS = (
    {"errors", "files", "types", "formatting", "process_identity"},
    {"inference"},
    {"config"},
    {"run_directory"},
    {"machine", "metrics"},
    {"envs", "algorithms", "transport"},
    {"workers"},
    {"runtime"},
    {"modes"},
    {"tuner"},
    {"cli", "dashboard"},
    {"api", "train", "__main__", "__init__"},
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
PAGE_IMPORTS = {
    "tuner",
    "config",
    "dashboard",
    "envs",
    "errors",
    "files",
    "formatting",
    "machine",
    "metrics",
    "process_identity",
    "run_directory",
    "types",
}
TORCH = ("inference/lazy_torch.py", "inference/policy_formats.py", "inference/user_modules.py", "workers/learner.py",
         "workers/replay_trainer.py", "workers/replay_batches.py", "workers/device_learner.py",
         "workers/gpu_replay.py", "workers/torch_devices.py", "tuner/update_probe.py",
         "runtime/metric_sinks.py", "cli/bench.py")  # fmt: skip
TORCH_FREE = ("algorithms.sac", "algorithms.td3", "algorithms.dqn", "algorithms.qmix", "algorithms.ppo",
              "algorithms.a2c", "algorithms.impact", "workers.main", "workers.samplers",
              "workers.evaluator", "workers.visualizer", "runtime.supervisor", "modes.replay_modes",
              "modes.serial", "modes.rollout_modes", "api", "train", "cli.train", "cli.tune", "cli.evaluate",
              "cli.play", "cli.runs",
              "cli.export",
              "__main__")  # fmt: skip


def _name(path):
    return ".".join(("spreeze", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def _imports(path):
    """(module, name or None) of every import statement, wherever it stands."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from ((node.module, alias.name) for alias in node.names)


def _tops(path):
    """Top-level parts of Spreeze that a file imports."""
    for module, name in _imports(path):
        if module == "spreeze" and name != "__version__":
            yield name
        elif module.startswith("spreeze."):
            yield module.split(".")[1]


def _users_of(package):
    return [relative(p) for p in FILES if any(m.split(".")[0] == package for m, _ in _imports(p))]


def test_imports_go_down():
    upwards = []
    for path in FILES:
        own = path.relative_to(ROOT).parts[0].removesuffix(".py")
        assert own in RANK, f"{own} has no layer yet: give it one in tests/contract/test_import_layers.py"
        upwards += [f"{relative(path)} imports {top}" for top in set(_tops(path)) - {own} if RANK[top] > RANK[own]]
    assert upwards == []


def test_the_page_reads_run_directories_and_knows_no_worker():
    pages = [path for path in FILES if path.relative_to(ROOT).parts[0] == "dashboard"]
    assert {top for path in pages for top in _tops(path)} <= PAGE_IMPORTS


def test_algorithms_and_transport_never_meet():
    for path in FILES:
        own = path.relative_to(ROOT).parts[0]
        other = {"algorithms": "transport", "transport": "algorithms"}.get(own)
        assert other not in set(_tops(path)), f"{relative(path)} imports {other}"


def test_torch_is_imported_only_where_gradients_are():
    assert [user for user in _users_of("torch") if not user.startswith(TORCH)] == []


def test_gymnasium_is_imported_only_where_environments_are():
    assert [user for user in _users_of("gymnasium") if not user.startswith(("envs/", "api.py"))] == []


def test_multiprocessing_is_imported_nowhere():
    assert _users_of("multiprocessing") == []


@pytest.mark.parametrize("package", ["pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"])
def test_nothing_is_ever_unpickled(package):
    assert _users_of(package) == []


def _executes(call):
    """Whether a call turns text into code or a file into objects."""
    if isinstance(call.func, ast.Name) and call.func.id in ("eval", "exec", "compile", "__import__"):
        return True
    if ast.unparse(call.func) in ("torch.load", "torch.save", "os.system"):
        return True
    return any(
        keyword.arg in ("allow_pickle", "shell") and getattr(keyword.value, "value", None) is True
        for keyword in call.keywords
    )


def test_no_text_becomes_code_and_no_file_becomes_objects():
    calls = ((path, node) for path in FILES for node in nodes(path) if isinstance(node, ast.Call))
    assert [f"{relative(path)}:{call.lineno}" for path, call in calls if _executes(call)] == []


@pytest.mark.parametrize("line", ["eval(x)", "torch.load(p)", "np.load(p, allow_pickle=True)", "run(c, shell=True)"])
def test_code_from_text_is_found(line):
    assert _executes(ast.parse(line).body[0].value)


_LOOK = """
import importlib, json, os, sys, threading
names = json.loads(sys.argv[1])
environment, files = dict(os.environ), set(os.listdir("."))
seen = {}
for name in names:
    importlib.import_module(name)
    seen.setdefault(name, [heavy for heavy in ("torch", "multiprocessing") if heavy in sys.modules])
print(json.dumps({
    "seen": seen, "threads": threading.active_count(), "environment": dict(os.environ) == environment,
    "files": sorted(set(os.listdir(".")) - files), "children": open(f"/proc/self/task/{os.getpid()}/children").read(),
}))
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """A process that imports what needs no torch, then every other module."""
    folder = tmp_path_factory.mktemp("imported")
    # A __main__ runs when imported, and the dashboard's pages are scripts that only Streamlit runs.
    modules = [p for p in FILES if p.name != "__main__.py" and p.relative_to(ROOT).parts[0] != "dashboard"]
    names = [*(f"spreeze.{name}" for name in TORCH_FREE), *map(_name, modules)]
    # Gymnasium itself sets the last of these when imported.
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT.parent), "HOME": str(folder),
                   "PYGAME_HIDE_SUPPORT_PROMPT": "hide"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", _LOOK, json.dumps(names)], capture_output=True, text=True, cwd=folder, check=False,
        timeout=PATIENCE_S, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 1, f"an import printed: {lines[:-1]}"
    assert done.stderr == ""
    return json.loads(lines[0])


def test_light_processes_load_neither_torch_nor_multiprocessing(imported):
    heavy = {name: imported["seen"][f"spreeze.{name}"] for name in TORCH_FREE}
    assert {name: found for name, found in heavy.items() if found} == {}, "the first of them imports it"


def test_importing_every_module_starts_nothing_and_writes_nothing(imported):
    assert imported["threads"] == 1
    assert imported["children"].strip() == ""
    assert imported["environment"]
    assert imported["files"] == []
