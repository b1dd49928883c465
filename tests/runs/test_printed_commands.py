"""Commands and programs of the README and its pages are run as printed, with small limits; the long ones are slow."""

import ast
import importlib.util
import re
import subprocess
import sys

import pytest
from harness import PATIENCE_S, REPO, TINY
from printed import PAGES, blocks, ours, shell_commands, spoken_commands

LIMITS = {
    "train": (*TINY, "--updates", "20"),
    "sweep": ("--trials", "1", "--seconds", "20", "--set", "evaluation.episodes=1"),
    "tune": ("--set", "tuning.budget_s=5"),
    "evaluate": ("--episodes", "2"),
    "play": ("--episodes", "1", "--clip", "clip.mp4"),
    "export": ("--force",),
}
"""Verb -> flags that end it soon; of two equal flags the last one counts."""
RESUMED = ("--updates", "40")
QUICK = ("completion", "evaluate", "export", "play", "query", "report")
NOT_RUN = {
    "bench": "needs a GPU, or takes minutes: tests/unit/bench, tests/benchmarks",
    "dashboard": "tests/page/test_server.py",
}
OF_OTHERS = {
    "python3", "pip", ".", ".venv/bin/pip", ".venv/bin/python",  # .ci/run, tests/slow/test_wheel.py
    "python3.11", "pre-commit", "streamlit", "ray", "export",
}  # fmt: skip
"""First words of other programs' commands, which other tests run or cannot be run here."""
NEEDS = {"gymnasium_robotics", "stable_baselines3"}
"""Packages of printed examples that no extra installs."""
OWN = next(text for page, text in blocks("python") if page == "assets/docs/extending.md")
"""The robot of the page: its file is ``my_robot.py``."""


def _is_doc(page):
    return page == "README.md" or page.startswith("assets/docs/")


def _commands():
    """Words of each command of Spreeze, once, as cases of a test."""
    typed = [ours(words) for page, words in shell_commands() if _is_doc(page)]
    typed += [words for page, words in spoken_commands() if _is_doc(page)]
    for words in sorted({tuple(words) for words in typed if words}):
        takes_seconds = (words[0] in QUICK and "walker2d" not in words) or "my_robot" in words
        marks = () if takes_seconds else (pytest.mark.slow,)
        if words[0] in NOT_RUN:
            marks = (pytest.mark.skip(reason=NOT_RUN[words[0]]),)
        yield pytest.param(words, marks=marks, id=" ".join(words)[:70])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a run, as the pages have it: ``runs/walker``."""
    folder = tmp_path_factory.mktemp("printed")
    _type(folder, "train", "--env", "Pendulum-v1", "--name", "walker", *LIMITS["train"])
    return folder


def _skip_without(text):
    for package in NEEDS:
        if package in text and importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}, which no extra installs")
    if "walker2d" in text and sys.version_info >= (3, 12):
        pytest.skip("Bullet has no wheel beyond Python 3.11")


def _program(folder, *arguments):
    """Runs Python in that folder, which has the page's robot; returns what it prints."""
    (folder / "my_robot.py").write_text(OWN)
    done = subprocess.run([sys.executable, *arguments], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, timeout=2 * PATIENCE_S, check=False)  # fmt: skip
    assert done.returncode == 0, f"{arguments}: {done.stdout[-2000:]} {done.stderr[-3000:]}"
    return done.stdout


def _type(folder, verb, *words):
    return _program(folder, "-m", "spreeze", verb, *words)


@pytest.mark.parametrize("words", list(_commands()))
def test_a_printed_command_runs(words, place, tmp_path):
    _skip_without(" ".join(words))
    verb = words[0]
    reads = {"latest", "walker2d"} & {*words}
    folder = place if reads and verb not in ("train", "sweep") else tmp_path
    limits = LIMITS.get(verb, ())
    if reads and verb in ("train", "sweep"):
        _type(tmp_path, "train", "--env", "Pendulum-v1", *limits)
    if "NAME.npz" in words and verb == "train":
        _type(place, "evaluate", "latest", "--episodes", "2", "--record", str(tmp_path / "NAME.npz"))
    _type(folder, *words, *(RESUMED if "--resume" in words else limits))


def _programs():
    found = list(blocks("python"))
    for number, (page, text) in enumerate(found):
        if _is_doc(page) and page != "README.md":  # that one: test_api.py
            earlier = [(other, block) for other, block in found[:number] if other == page]
            yield pytest.param(page, text, [block for _, block in earlier], id=f"{page.rpartition('/')[2]}-{number}")


@pytest.mark.parametrize(("page", "text", "earlier"), list(_programs()))
def test_a_printed_program_runs(page, text, earlier, tmp_path):
    """It follows the classes of its page that it names and, where it loads the latest run, the command before it."""
    _skip_without(text)
    if "latest" in re.sub("#.*", "", text):
        before = PAGES[page].partition(text)[0]
        command = re.findall(r"^python -m spreeze\.train (.*)$", before, re.MULTILINE)[-1]
        _type(tmp_path, "train", *command.split(), *LIMITS["train"])
    names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    defines = [block for block in earlier if names & set(re.findall(r"^class (\w+)", block, re.MULTILINE))]
    short = re.sub(r"target_return=-?\d+|env_steps=[\d_]+|updates=[\d_]+|seconds=\d+", "updates=20", text)
    short = re.sub(r"learn\([\d_]+", "learn(200", short)
    (tmp_path / "program.py").write_text("\n\n".join([*defines, short]))
    _program(tmp_path, "program.py")


def test_a_printed_main_of_c_compiles_beside_the_exported_header(place, tmp_path):
    for number, (_, text) in enumerate(blocks("c")):
        (tmp_path / f"{number}.c").write_text(text)
        _type(place, "export", "walker", "--format", "c", "--out", str(tmp_path / "walker.h"), "--force")
        done = subprocess.run(["cc", "-std=c99", "-Wall", "-Wextra", "-Werror", "-c", f"{number}.c"], cwd=tmp_path,
                              capture_output=True, text=True, timeout=PATIENCE_S, check=False)  # fmt: skip
        assert done.returncode == 0, done.stderr


def test_every_other_command_is_one_that_is_known_here():
    others = [words for page, words in shell_commands() if _is_doc(page) and ours(words) is None]
    assert {words[0] for words in others if words[:3] != ["python", "-m", "pytest"]} - OF_OTHERS == set()
    for words in others:
        for file, _, name in (word.partition("::") for word in words if word.startswith("tests/")):
            assert not name or f"def {name}(" in (REPO / file).read_text(), words
