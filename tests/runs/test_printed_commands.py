"""Commands and programs of the README and its pages are run as printed, with small limits; the long ones are slow."""

import ast
import importlib.util
import re
import subprocess
import sys
from typing import NamedTuple

import pytest
from harness import PATIENCE_S, REPO, TINY
from printed import PAGES, commands_of, ours, spoken_commands

LIMITS = {
    "train": (*TINY, "--updates", "20"),
    "sweep": ("--trials", "1", "--seconds", "40", "--set", "evaluation.episodes=1"),
    "tune": ("--set", "tuning.budget_s=5"),
    "evaluate": ("--episodes", "2"),
    "play": ("--episodes", "1", "--clip", "clip.mp4"),
    "export": ("--force",),
}
"""Verb -> flags that end it soon; of two equal flags the last one counts."""
RESUMED = ("--updates", "40")
QUICK = ("completion", "evaluate", "export", "play", "query", "report")
"""Verbs of which the first printed command is run each time."""
QUICK_SECTIONS = ("Your own environment in five minutes", "Your own callbacks", "A policy on a microcontroller")
NOT_RUN = {
    "bench": "needs a GPU, or takes minutes: tests/unit/bench, tests/benchmarks",
    "dashboard": "tests/page/test_server.py",
    **dict.fromkeys(("push", "pull"), "ask a hub: tests/unit/cli/test_hub.py"),
}
OF_OTHERS = {
    "python3", "pip", ".", ".venv/bin/pip", ".venv/bin/python",  # .ci/run, tests/slow/test_wheel.py
    "python3.11", "pre-commit", "streamlit", "ray", "export", "hf",
}  # fmt: skip
"""First words of other programs' commands, which other tests run or cannot be run here."""
NEEDS = ("gymnasium_robotics", "stable_baselines3")
"""Packages of printed examples that no extra installs."""


class Section(NamedTuple):
    """What stands below one heading, in order; a reader goes through it in one directory."""

    page: str
    title: str
    blocks: list[tuple[str, str]]
    """Language and text of each block."""


def _sections():
    for page, text in PAGES.items():
        if page == "README.md" or page.startswith("assets/docs/"):
            for part in re.split(r"^#{2,3} ", text, flags=re.MULTILINE)[1:]:
                found = re.findall(r"^```(bash|python|c)\n(.*?)^```", part, re.MULTILINE | re.DOTALL)
                yield Section(page, part.partition("\n")[0], found)


SECTIONS = [section for section in _sections() if section.blocks]
PROGRAMS = [text for section in SECTIONS for language, text in section.blocks if language == "python"]
FILES = {text.split()[1]: text for text in PROGRAMS if re.match(r"# \w+\.py\n", text)}
"""Programs that a page keeps in a file, which their first line names."""


def _short(text):
    """The program with small limits."""
    text = re.sub(r"(target_return|env_steps|updates|seconds)=-?[\d_]+", "updates=20", text)
    return re.sub(r"learn\([\d_]+", "learn(200", text)


def _with_definitions(text):
    """The program below those classes of other blocks whose names it uses."""
    names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    names -= set(re.findall(r"^class (\w+)", text, re.MULTILINE))
    before = [other for other in PROGRAMS if names & set(re.findall(r"^class (\w+)", other, re.MULTILINE))]
    return "\n\n".join([*(other.partition("\nif __name__")[0] for other in before[:1]), text])


def _skip_without(text):
    for package in NEEDS:
        if package in text and importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}, which no extra installs")
    if "walker2d" in text and sys.version_info >= (3, 12):
        pytest.skip("Bullet has no wheel beyond Python 3.11")


def _program(folder, *arguments):
    """Runs Python in that folder, which has the files of the pages."""
    for name, text in FILES.items():
        (folder / name).write_text(_short(text))
    done = subprocess.run([sys.executable, *arguments], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, timeout=2 * PATIENCE_S, check=False)  # fmt: skip
    assert done.returncode == 0, f"{arguments}: {done.stdout[-2000:]} {done.stderr[-3000:]}"


def _type(folder, verb, *words):
    """Runs a command of Spreeze with small limits."""
    if verb in NOT_RUN:
        return
    limits = RESUMED if "--resume" in words else LIMITS.get(verb, ())
    _program(folder, "-m", "spreeze", verb, *words, *limits)


def _begin(folder):
    """Leaves a run there, as the pages have one: ``runs/walker``."""
    _type(folder, "train", "--env", "Pendulum-v1", "--name", "walker")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a run, which is only read."""
    folder = tmp_path_factory.mktemp("printed")
    _begin(folder)
    return folder


def _spoken():
    """Words of each command that stands in a sentence or a table of a page, once."""
    pages, seen = {section.page for section in SECTIONS}, {*NOT_RUN}
    for words in sorted({tuple(words) for page, words in spoken_commands() if page in pages} - {("train",)}):
        quick = words[0] in QUICK and "walker2d" not in words and words[0] not in seen
        seen |= {words[0]} if quick else set()
        yield pytest.param(words, marks=() if quick else (pytest.mark.slow,), id=" ".join(words)[:70])


@pytest.mark.parametrize("words", list(_spoken()))
def test_a_command_of_a_sentence_or_a_table_runs(words, place, tmp_path):
    _skip_without(" ".join(words))
    writes = words[0] in ("train", "sweep")
    if writes and "latest" in words:
        _begin(tmp_path)
    _type(tmp_path if writes else place, *words)


def _walks():
    for section in SECTIONS:
        marks = () if section.title in QUICK_SECTIONS else (pytest.mark.slow,)
        yield pytest.param(section, marks=marks, id=f"{section.page.rpartition('/')[2]}: {section.title}")


@pytest.mark.parametrize("section", list(_walks()))
def test_what_a_section_prints_runs_from_its_first_line_to_its_last(section, tmp_path):
    printed = "\n".join(text for _, text in section.blocks)
    if "latest" in printed.partition("train")[0] or '"walker.h"' in printed or "NAME.npz" in printed:
        _begin(tmp_path)
    if "NAME.npz" in printed:
        _type(tmp_path, "evaluate", "latest", "--record", "NAME.npz")
    for language, text in section.blocks:
        if language == "python":
            _run_program(text, tmp_path)
        elif language == "c":
            _compile(text, tmp_path)
        else:
            _run_shell(text, tmp_path)


def _run_program(text, folder):
    if text not in FILES.values():
        _skip_without(text)
        (folder / "program.py").write_text(_short(_with_definitions(text)))
        _program(folder, "program.py")


def _run_shell(text, folder):
    for words in commands_of(text):
        typed = ours(words)
        if typed:
            _skip_without(" ".join(words))
            _type(folder, *typed)
        elif words[0] == "python" and words[1] in FILES:
            _program(folder, words[1])


def _compile(text, folder):
    _type(folder, "export", "walker", "--format", "c", "--out", "walker.h")
    (folder / "main.c").write_text(text)
    done = subprocess.run(["cc", "-std=c99", "-Wall", "-Wextra", "-Werror", "-c", "main.c"], cwd=folder,
                          capture_output=True, text=True, timeout=PATIENCE_S, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_every_other_command_is_one_that_is_known_here():
    shell = [text for section in SECTIONS for language, text in section.blocks if language == "bash"]
    others = [words for text in shell for words in commands_of(text) if ours(words) is None]
    scripts = {"-m", *FILES, *(path.relative_to(REPO).as_posix() for path in (REPO / "tests").rglob("*.py"))}
    known = [words for words in others if words[1:] and words[1] in scripts]
    assert {words[0] for words in others if words not in known} - OF_OTHERS == set()
    for words in others:
        for file, _, name in (word.partition("::") for word in words if word.startswith("tests/")):
            assert not name or f"def {name}(" in (REPO / file).read_text(), words
