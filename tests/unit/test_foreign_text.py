"""What a run from elsewhere says reaches the terminal as plain text: no escape of it is obeyed, whatever prints it."""

import ast
import io
import json
import re
import shutil
import subprocess
import sys

import pytest
from harness import PATIENCE_S, PENDULUM, REPO, train
from rich.table import Table
from rich.text import Text
from sources import FILES, nodes, relative

from spreeze import formatting
from spreeze.cli.evaluate import main as evaluate
from spreeze.cli.play import main as play
from spreeze.cli.runs import main as runs
from spreeze.cli.terminal import Screen, show_tuning
from spreeze.cli.train import main as trained
from spreeze.config.layers import resolve
from spreeze.machine import output
from spreeze.transport.weights import encode, read_weights
from spreeze.tuner import run as tuner_run

pytestmark = pytest.mark.warm

EVIL = "\x1b]0;owned\x07\x1b[2J\x1b]52;c;b3du\x1b\\\x9b31m\r\x08\u202e\u2066\ufeff\udc9b\x00[bold][link=http://evil.example]x"
"""Sets the title, clears the screen, fills the clipboard, colours, goes back, turns the direction; rich's markup."""
UNWANTED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff]")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    run, code, _ = train(folder, *PENDULUM, "--updates", "100")
    assert code == 0, run.stderr
    return run.path


@pytest.fixture
def foreign(finished, tmp_path):
    """A copy of the run, each text in it replaced by one that a terminal would obey."""
    path = tmp_path / "runs" / "run"
    shutil.copytree(finished, path)
    for name in ("run.json", "summary.json", "env.json", "weights/LATEST.json", "checkpoints/best.json"):
        told = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps(spoiled(told)))
    for file in [*path.glob("weights/w-*.safetensors"), path / "checkpoints" / "best.safetensors"]:
        weights = read_weights(file)
        meta = weights.meta | {"algo": EVIL.replace("\udc9b", "")}
        file.write_bytes(encode(weights.arrays, meta, weights.epoch, weights.version))
    return path


def spoiled(value):
    if isinstance(value, dict):
        return {name: spoiled(entry) for name, entry in value.items()}
    return EVIL + value if isinstance(value, str) else value


def plain(capsys):
    """What was printed; an AssertionError where a terminal would obey any of it."""
    out, err = capsys.readouterr()
    assert UNWANTED.findall(out + err) == []
    return out + err


def test_the_list_of_runs_is_plain_text(foreign, capsys):
    shutil.copytree(foreign, foreign.with_name("b" * 120))
    shutil.copytree(foreign, foreign.with_name(f"a\n\x1b[31mb{'x' * 150}"))
    folder = ["--runs-dir", str(foreign.parent)]
    assert runs([*folder, "list"]) == 0
    lines = plain(capsys).splitlines()
    assert len(lines) == 4
    assert max(map(len, lines)) < 200
    assert lines[0].startswith("not listed: a "), "a name with a line break is one line"
    assert any(line.startswith("run ") and "owned" in line for line in lines[2:])
    assert runs([*folder, "--json", "list"]) == 0
    out, err = capsys.readouterr()
    assert UNWANTED.findall(out + err) == []
    assert err.startswith("not listed: ")
    rows = json.loads(out)["runs"]
    assert {row["name"] for row in rows} == {"run", "b" * 120}
    assert {row["state"] for row in rows} == {EVIL + "finished"}, "a program gets all of it, escaped"


@pytest.mark.parametrize(
    "value",
    [10**400, float("inf"), float("nan"), True, [], {}, EVIL],
    ids=["huge", "infinite", "nan", "truth", "list", "table", "text"],
)
def test_a_number_that_cannot_be_is_a_dash(foreign, capsys, value):
    told = json.loads((foreign / "run.json").read_text())
    (foreign / "run.json").write_text(
        json.dumps(told | {"wall_s": value, "updates": value, "eval_best": value, "eval_final": value})
    )
    assert runs(["--runs-dir", str(foreign.parent)]) == 0
    assert plain(capsys).splitlines()[1].split()[-2:] == ["-", "-"]


def test_the_real_command_prints_no_escape(foreign):
    done = subprocess.run(
        [sys.executable, "-m", "spreeze", "runs", "--runs-dir", str(foreign.parent)],
        capture_output=True,
        cwd=REPO,
        timeout=PATIENCE_S,
        check=True,
    )
    assert UNWANTED.findall(done.stdout.decode("utf-8") + done.stderr.decode("utf-8")) == []
    assert b"owned" in done.stdout


CONFIGS = ("id", "algo", "number", "key", "broken")
"""Ways in which a config.toml is foreign; only some verbs read it."""
VERBS = (
    *((runs, *rest) for rest in (("stop", "run"), ("stop", "--force", "run"), ("visualizer", "nun", "pause"))),
    *((evaluate, *rest) for rest in (("nun",), ("run", "--episodes", "1"), ("run", "--episodes", "1", "--json"))),
    (play, "run"), (play, "run", "--checkpoint", "best"),
)  # fmt: skip
READERS = ((trained, "--resume", "run", "--updates", "1"), (trained, "--resume", "run", "--env", "Pendulum-v0"),
           (evaluate, "run", "--protocol", "hts"))  # fmt: skip
"""With one update asked for a resumed run continues and ends: it has more already."""


def foreign_config(text, how):
    told = json.dumps(EVIL.replace("\udc9b", ""))  # TOML's escapes are those of JSON
    if how in ("key", "broken"):
        return f"[learner]\n{told} = 1\n" if how == "key" else f"{text}\nx = \x1b[2J{told}"
    field = {"number": "batch_size"}.get(how, how)
    return text if how == "whole" else re.sub(rf"(?m)^{field} = .*", lambda _: f"{field} = {told}", text, count=1)


@pytest.mark.parametrize(
    ("arguments", "config"),
    [*((verb, "whole") for verb in VERBS + READERS), *((verb, config) for verb in READERS for config in CONFIGS)],
    ids=lambda value: value if isinstance(value, str) else " ".join([value[0].__module__.split(".")[1], *value[1:]]),
)
def test_every_verb_tells_of_a_foreign_run_in_plain_text(foreign, capsys, monkeypatch, arguments, config):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    main, *rest = arguments
    whole = (foreign / "config.toml").read_text()
    (foreign / "config.toml").write_text(foreign_config(whole, config))
    assert config == "whole" or (foreign / "config.toml").read_text() != whole
    folder = ["--runs-dir", str(foreign.parent)]
    code = main([*folder, *rest] if main is runs else [*rest, *folder])
    assert code in (0, 1, 2)
    assert plain(capsys).strip()


def test_the_memory_of_the_tuner_is_told_in_plain_text(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "spreeze").mkdir()
    (tmp_path / "spreeze" / "tune-k.json").write_text(
        json.dumps(
            {
                "schema": tuner_run.SCHEMA,
                "key": "k",
                "reasons": {},
                "measured_at": "",
                "notes": [],
                "limits": [],
                "formula": "",
                "labels": {},
                "update_rates": [],
                "joint_rates": [],
                "choice": {},
                "settings": {f"learner.{EVIL}": 1},
            }
        )
    )
    assert tuner_run._load(tmp_path / "spreeze" / "tune-k.json", "k", resolve([]), output.say) is None
    assert "damaged" in plain(capsys)


def test_the_tuner_s_tables_show_a_foreign_record_as_it_is_written():
    rate = {
        "stage": "rollout",
        "setting": {EVIL: EVIL},
        "updates_per_s": [],
        "env_steps_per_s": [],
        "cpu_share": [],
        "failure": EVIL,
    }
    record = {
        "choice": {EVIL: EVIL},
        "labels": {EVIL: EVIL},
        "rollout_rates": [rate],
        "objective": EVIL,
        "formula": EVIL,
        "reasons": {EVIL: EVIL},
        "limits": [EVIL],
        "notes": [EVIL],
    }
    for is_terminal in (False, True):
        stream = io.StringIO()
        stream.isatty = lambda answer=is_terminal: answer
        show_tuning(record, stream, reasons=True)
        own_colours = r"\x1b\[[0-9;]*m" if is_terminal else "(?!)"
        shown = re.sub(own_colours, "", stream.getvalue())
        assert UNWANTED.findall(shown) == []
        assert "[bold][link=http://evil.example]x" in shown.replace("\n", "")


def test_a_screen_shows_escapes_and_markup_and_keeps_its_own_colours():
    stream = io.StringIO()
    screen = Screen(file=stream, force_terminal=True, width=200, color_system="standard")
    table = Table(title=EVIL)
    table.add_column(EVIL)
    table.add_row(Text(EVIL, style="red"))
    table.add_row(EVIL)
    screen.print(table)
    screen.print(EVIL)
    screen.print(Text(EVIL, style="bold"))
    shown = stream.getvalue()
    assert "\x1b[31m" in shown
    assert UNWANTED.findall(re.sub(r"\x1b\[[0-9;]*m", "", shown)) == []
    assert "\x1b]8" not in shown, "no hidden address behind a word"


def test_lines_stay_and_what_the_stream_cannot_write_is_no_error(monkeypatch):
    assert formatting.printable("a\tb\nc\x1b[2Jd\x9bé→") == "a\tb\nc [2Jd é→"
    assert formatting.clean("a\u2066b\ufeffc\U000e0041d") == "a b c d"
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    output.say("é\ud800\x1bx")
    assert raw.getvalue() == b"?  x\n"


ALLOWED = {"machine/output.py", "__main__.py", "tuner/update_probe.py",
           "runtime/cluster/ray_nodes.py",
           "runtime/metric_sinks.py"}  # fmt: skip
"""The one place, what names verbs, what tells its parent a number, and what W&B logs. Workers' streams are logs."""


def _prints(call):
    """Whether a call writes to the terminal by itself."""
    name = ast.unparse(call.func)
    if name == "Console":
        return "record=True" not in ast.unparse(call)
    return name in ("print", "sys.stdout.write", "sys.stderr.write", "rich.print")


def test_nothing_prints_but_through_the_one_place():
    found = []
    for path in FILES:
        name = relative(path)
        if name not in ALLOWED and not name.startswith("workers/"):
            found += [f"{name}:{node.lineno}" for node in nodes(path) if isinstance(node, ast.Call) and _prints(node)]
    assert found == [], "take machine.output.say, or a Screen"
