"""Commands and programs of the docs: each command is understood as printed, each program names what there is."""

import argparse
import ast
import importlib
import re
import runpy
import shlex
import signal
import sys

import pytest
from printed import PAGES, ROOT, blocks, ours, shell_commands, spoken_commands

from spreeze.__main__ import main_of
from spreeze.cli.arguments import Parser, build_parser
from spreeze.cli.planning import layers_of
from spreeze.cli.sweep_search import is_fixed, space
from spreeze.config.layers import resolve
from spreeze.config.schema import SECTIONS
from spreeze.machine.hardware import read_machine

COMMANDS = sorted(
    {
        (page, *words)
        for page, words in (*((page, ours(words)) for page, words in shell_commands()), *spoken_commands())
        if words
    }
)
PROGRAMS = list(blocks("python"))


class Understood(Exception):
    pass


@pytest.mark.parametrize("command", COMMANDS, ids=[" ".join(words)[:60] for _, *words in COMMANDS])
def test_a_printed_command_is_understood(command, monkeypatch):
    def parse_args(self, *args):
        raise Understood(original(self, *args))

    original = Parser.parse_args
    monkeypatch.setattr(Parser, "parse_args", parse_args)
    _, verb, *rest = command
    command_main = main_of(verb)
    with pytest.raises((Understood, SystemExit)) as found:
        command_main(rest)
    if found.type is SystemExit:
        assert {"--help", "--help-all"} & {*rest}
        assert found.value.code == 0
        return
    args = found.value.args[0]
    if verb == "train" and not args.resume:
        resolve(layers_of(args, None, read_machine())[0])
    if verb == "sweep" and args.search and args.set:
        monkeypatch.undo()
        fixed = [word for text in args.set if is_fixed(text) for word in ("--set", text)]
        config = resolve(layers_of(_train_args(args, fixed), None, read_machine())[0]).config
        axes, _ = space(args.set, config)
        assert len(axes) + len(fixed) // 2 == len(args.set)


def _train_args(args, flags):
    return build_parser().parse_args(["--env", args.env, "--algo", args.algo, *flags])


def _measurements():
    """Script and arguments of each printed command that measures."""
    spans = (span for text in PAGES.values() for span in re.findall(r"`(?:\w+=\S+ )*(python tests/[^`]+)`", text))
    commands = [words for _, words in shell_commands()] + [shlex.split(span) for span in spans if "..." not in span]
    return sorted({tuple(words[1:]) for words in commands if words[2:] and words[1].startswith("tests/benchmarks/")})


@pytest.mark.parametrize("command", _measurements(), ids=lambda words: " ".join(words)[17:80])
def test_a_printed_command_that_measures_is_understood(command, monkeypatch):
    def parse_args(self, *args):
        raise Understood(original(self, *args))

    original = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.setattr(signal, "signal", lambda *handler: None)
    monkeypatch.setattr(sys, "argv", [*command])
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "benchmarks"))
    with pytest.raises(Understood):
        runpy.run_path(str(ROOT / command[0]), run_name="__main__")


@pytest.mark.parametrize(
    ("page", "text"), PROGRAMS, ids=[f"{page}-{number}" for number, (page, _) in enumerate(PROGRAMS)]
)
def test_a_printed_program_is_python_and_imports_what_there_is(page, text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "spreeze":
            module = importlib.import_module(node.module)
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == [], page
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "spreeze":
            assert hasattr(importlib.import_module("spreeze"), node.attr), page


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.startswith("assets/docs/") and "changelog" not in page]
)
def test_a_printed_setting_exists(page):
    for section, name in re.findall(r"`([a-z_]\w*)\.([a-z]\w+)(?:=[^`]*)?`", PAGES[page]):
        if section in SECTIONS and name not in ("json", "safetensors", "toml"):
            assert name in SECTIONS[section].__dataclass_fields__, f"{section}.{name}"


def test_both_are_found():
    assert len(COMMANDS) > 10
    assert len(PROGRAMS) >= 5
