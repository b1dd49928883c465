"""A damaged or hostile state file of one run costs that run its numbers, and takes no page or verb down."""

import json
import math
import os
import shutil

import pytest

from spreeze.cli.evaluate import main as evaluate
from spreeze.cli.runs import main as runs
from spreeze.cli.runs import report
from spreeze.dashboard import live_api
from spreeze.files import read_json
from spreeze.run_directory import _FIELDS, find_run, list_runs, read_config, read_run, session_starts, state_of

pytest.importorskip("streamlit")
from test_pages import PAGES, make_run, open_page

from spreeze.dashboard.run_data import rows

ODD = {
    "nan": "NaN", "infinite": "1e400", "minus infinite": "-Infinity", "huge": "1" + 400 * "0", "digits": "9" * 5000,
    "large": "1e308", "text": '"x"', "empty text": '""', "true": "true", "null": "null", "negative": "-7", "list": "[]",
    "nan in a list": "[NaN, 1e400, \"x\", [1]]", "object": '{"a": NaN}', "deep": 50 * "[" + 50 * "]",
    "fraction": "0.5", "huge in lists": f"[[{'1' + 30 * '0'}]]",
}  # fmt: skip
"""Values as JSON."""
NUMBERS = (
    "env_steps",
    "updates",
    "episodes",
    "sessions",
    "wall_s",
    "eval_best",
    "eval_final",
    "heartbeat",
    "seed",
    "pid",
)


def few(values, *names):
    """Cases of the values, slow but for those of these names."""
    return [pytest.param(value, id=name, marks=() if name in names else pytest.mark.slow)
            for name, value in values.items()]  # fmt: skip


def odd_run(folder, name, value, fields=tuple(_FIELDS)):
    """A run whose ``run.json`` has that text as value of all fields."""
    path = make_run(folder, name)
    told = ", ".join(f'"{field}": {value}' for field in fields)
    (path / "run.json").write_text("{" + told + "}")
    return path


@pytest.mark.parametrize("value", ODD.values(), ids=ODD.keys())
def test_each_field_is_usable_or_missing(tmp_path, value):
    run = read_run(odd_run(tmp_path, "odd", value))
    for name in NUMBERS:
        found = run.get(name)
        assert found is None or (isinstance(found, int | float) and not isinstance(found, bool) and abs(found) <= 1e100)
    assert all(isinstance(t, float) and math.isfinite(t) for t in session_starts(run))
    assert isinstance(state_of(tmp_path / "odd"), str)
    json.dumps(run, allow_nan=False)


@pytest.mark.parametrize("value", few(ODD, "nan", "huge", "text", "null", "list", "deep"))
def test_verbs_and_the_live_answer_bear_one_odd_run_beside_a_good_one(tmp_path, capsys, value):
    good, odd = make_run(tmp_path, "good"), odd_run(tmp_path, "odd", value)
    (odd / "summary.json").write_text(json.dumps({"wall_s": None}).replace("null", value))
    (odd / "about.json").write_text(f'{{"title": {value}, "note": {value}, "tags": {value}}}')
    folder = ["--runs-dir", str(tmp_path)]
    assert {row.name for row in rows(tmp_path)} == {"good", "odd"}
    assert runs([*folder, "list"]) == 0
    assert runs([*folder, "--json", "list"]) == 0
    assert evaluate(["good", "odd", "--protocol", "hts", *folder]) == 0
    assert report(["good", "odd", "--out", str(tmp_path / "report.html"), *folder]) == 0
    assert "Traceback" not in capsys.readouterr().err
    for path in (good, odd):
        json.dumps(live_api.live_response(path, 0.0, 0, ""), allow_nan=False)


TOML = {"nan": "nan", "infinite": "inf", "huge": "1" + 400 * "0", "text": '"x"', "list": "[nan]",
        "table": "{ a = inf }", "true": "true", "time": "1979-05-27T07:32:00Z", "negative": "-7"}  # fmt: skip


@pytest.mark.parametrize("value", few(TOML, "nan", "huge", "text", "table"))
def test_odd_settings_take_neither_the_live_answer_nor_a_report_down(tmp_path, value):
    path = make_run(tmp_path, "odd")
    fields = {"learner": ("batch_size", "device"), "sampling": ("samplers",), "rollout": ("samplers",),
              "run": ("algo",), "visualizer": ("enabled",), "env": ("id", "import_module"),
              "replay": ("learning_starts", "samples_per_insert_min", "samples_per_insert_max")}  # fmt: skip
    (path / "config.toml").write_text(
        "".join(f"[{part}]\n" + "".join(f"{name} = {value}\n" for name in names) for part, names in fields.items())
    )
    json.dumps(live_api.live_response(path, 0.0, 0, ""), allow_nan=False)
    assert report(["odd", "--out", str(tmp_path / "report.html"), "--runs-dir", str(tmp_path)]) == 0
    assert evaluate(["odd", "--protocol", "hts", "--runs-dir", str(tmp_path)]) == 0
    assert isinstance(read_config(path), dict)


def test_every_page_opens_beside_odd_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("SPREEZE_RUNS_DIR", str(tmp_path))
    make_run(tmp_path, "good")
    for number, value in enumerate(ODD.values()):
        path = odd_run(tmp_path, f"odd{number}", value)
        (path / "config.toml").write_text(
            "[learner]\nbatch_size = nan\n[sampling]\nsamplers = 'x'\n[run]\nalgo = [1]\n"
        )
    for page in PAGES:
        opened = open_page(page)
        assert not opened.exception, (page, [e.message for e in opened.exception])


@pytest.mark.parametrize("value", ["NaN", "1e400", "-1e400", "1" + 400 * "0", "Infinity", f"[{2**70}]"])
def test_no_json_file_gives_a_number_that_cannot_be_used(tmp_path, value):
    (tmp_path / "tune.json").write_text(f'{{"a": {value}, "b": [{value}], "c": 1.5, "d": {2**62}}}')
    found = read_json(tmp_path / "tune.json")
    assert (found["c"], found["d"]) == (1.5, 2**62)
    assert found["a"] in (None, [None])


# --- the newest run ---


def started(folder, name, text, **more):
    path = folder / name
    path.mkdir()
    (path / "run.json").write_text(json.dumps({"state": "finished", "started": text, **more}))
    return path


@pytest.mark.parametrize(("early", "late"), [
    ("2026-11-21T11:00:00+0200", "2026-11-21T10:00:00+0000"),  # a container in UTC beside its host
    ("2026-10-25T02:50:00+0200", "2026-10-25T02:10:00+0100"),  # the hour that comes twice
    ("2026-11-21T10:00:00+0000", "2026-11-21T10:00:01+0000"),
    ("2026-11-21", "2026-11-22"),
])  # fmt: skip
def test_latest_is_the_run_that_began_last_whatever_its_clock_showed(tmp_path, early, late):
    for first, second in (("a", "b"), ("c", "d")):
        folder = tmp_path / first
        folder.mkdir()
        names = (second, first) if first == "a" else (first, second)
        started(folder, names[0], early)
        started(folder, names[1], late)
        assert [path.name for path in list_runs(folder)] == list(names)
        assert find_run("latest", folder).name == names[1]


def test_seconds_count_more_than_text(tmp_path):
    started(tmp_path, "a", "2026-11-21T10:00:00+0000", started_s=1_800_000_000.0)
    started(tmp_path, "b", "2026-11-22T10:00:00+0000", started_s=1_799_999_999.0)
    assert find_run("latest", tmp_path).name == "a"


@pytest.mark.parametrize("damage", ["", "{", '{"started": 5}', '{"state": "finished"}', "[]", '{"started": "soon"}'])
def test_latest_does_not_pass_over_a_damaged_newer_run_in_silence(tmp_path, capsys, damage):
    started(tmp_path, "old", "2026-11-21T10:00:00+0000")
    (started(tmp_path, "new", "2026-11-22T10:00:00+0000") / "run.json").write_text(damage)
    assert evaluate(["latest", "--runs-dir", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert told == (
        "error: latest: new may be the newest run, but its run.json is damaged; name the run explicitly: "
        "new, or old, the newest of the others\n"
    )
    assert find_run("new", tmp_path).name == "new"
    shutil.rmtree(tmp_path / "old")
    assert find_run("latest", tmp_path).name == "new", "there is no other"


def test_latest_is_not_bothered_by_a_damaged_run_that_is_older(tmp_path):
    damaged = started(tmp_path, "damaged", "x") / "run.json"
    os.utime(damaged, (1.0, 1.0))
    started(tmp_path, "newer", "2026-11-21T10:00:00+0000")
    assert find_run("latest", tmp_path).name == "newer"
