"""The report: one file without script or network, of whatever a run directory holds."""

import json
import re
from html.parser import HTMLParser

import pytest
from harness import REPO

from spreeze.cli.runs import report
from spreeze.config.layers import Layer, resolve, sources_of, to_toml
from spreeze.errors import ConfigError
from spreeze.metrics import html_report
from spreeze.metrics.store import EvaluationRow
from spreeze.metrics.writer import MetricsWriter

SAMPLE = REPO / "assets" / "sample_run"
NASTY = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>\u202e\x1b[31m"
TAGS = {
    "html", "head", "meta", "title", "style", "body", "main", "header", "section", "h1", "h2", "h3", "h4", "p", "dl",
    "div", "dt", "dd", "table", "thead", "tbody", "tr", "th", "td", "details", "summary", "figure", "figcaption", "svg",
    "line", "text", "polyline", "polygon", "circle", "span", "i", "img",
}  # fmt: skip


class Parsed(HTMLParser):
    """The tags, attributes and text of a file; an AssertionError if tags do not pair."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.said, self._open = set(), [], [], []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in ("meta", "img"):
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.said.append(data)


def parsed(text):
    found = Parsed(text)
    assert found.tags <= TAGS
    assert not any(name.startswith("on") or name in ("href", "style") for name, _ in found.attributes)
    assert all(value.startswith("data:image/jpeg;base64,") for name, value in found.attributes if name == "src")
    assert "http" not in "".join(value or "" for name, value in found.attributes if name != "http-equiv")
    return found


@pytest.fixture
def make_run(tmp_path):
    """Writes a run directory with three evaluations around ``level``."""

    def make(name, level=1.0, *, env="Pendulum-v1", event="all is well", **settings):
        path = tmp_path / name
        path.mkdir()
        (path / "run.json").write_text(json.dumps({
            "env_id": env, "algo": "sac", "mode": "serial", "seed": 1, "state": "finished", "wall_s": 3.0,
            "versions": {"numpy": "2", "torch": None}, "machine": f"cores {event}", "started": event,
        }))  # fmt: skip
        layers = [Layer("profile pendulum", {"sac": {"gamma": 0.9}}), Layer("user", {"learner": settings})]
        (path / "config.toml").write_text(to_toml(resolve(layers)))
        writer = MetricsWriter(path / "metrics.db")
        for k in range(3):
            writer.write(float(k), 10 * k, {"updates_per_s": 100.0 + k, "cpu_use": 0.5})
            writer.evaluation(EvaluationRow(float(k), 10 * k, k, 1, k, 2, level + k, 0.0, 5.0))
        writer.event(2.0, "info", event, event)
        writer.close()
        return path

    return make


def test_the_sample_run_has_its_curves_settings_with_sources_tuner_machine_and_picture():
    text = html_report.make([SAMPLE])
    found = parsed(text)
    assert {"img", "polyline", "svg", "table"} <= found.tags
    for words in ("Learning curves", "Updates/s [1/s]", "The tuner", "chosen", "profile pendulum", "torch",
                  "Machine and versions", "Samplers beside the learner"):  # fmt: skip
        assert words in found.said, words


def test_runs_of_the_same_name_in_two_directories_have_a_row_each(make_run, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    runs = [make_run("a"), make_run("elsewhere/a")]
    for path, reason in zip(runs, ("the first", "the second"), strict=True):
        state = json.loads((path / "run.json").read_text()) | {"exit_reason": reason}
        (path / "run.json").write_text(json.dumps(state))
    assert {"the first", "the second"} <= set(parsed(html_report.make(runs)).said)


def test_runs_of_one_setting_are_a_mean_with_a_band_and_others_a_curve_of_their_own(make_run):
    paths = [make_run("a", 1.0), make_run("b", 2.0), make_run("d", 3.0), make_run("c", 7.0, batch_size=32)]
    found = parsed(html_report.make(paths))
    assert "polygon" in found.tags
    assert "sac serial learner.batch_size=256 (3 runs)" in found.said
    assert "sac serial learner.batch_size=32 (1 run)" in found.said
    assert "3 [2, 4]" in found.said  # means over the episodes of all three evaluations: 2, 3 and 4
    place = found.said.index("learner.batch_size")
    assert found.said[place + 1 : place + 5] == ["256", "256", "256", "32"]


def test_two_curves_are_drawn_where_their_numbers_are(make_run):
    text = html_report.make([make_run("a", 1.0)])
    # Running means 1, 1.5 and 2 at 0, 1 and 2 s, in a box from (52, 10) to (468, 210) with 4 % of room.
    assert 'points="52.0,202.6 260.0,110.0 468.0,17.4"' in text


def test_text_of_a_run_is_shown_and_never_obeyed(make_run):
    path = make_run("nasty", env=NASTY, event=NASTY)
    (path / "tune.json").write_text(json.dumps({
        "update_rates": [{"stage": "learner", "setting": {"learner.batch_size": 1, "learner.threads": 1, NASTY: NASTY},
                          "failure": NASTY, "updates_per_s": [1.0]}],
        "choice": {NASTY: NASTY}, "reasons": {NASTY: NASTY}, "objective": NASTY, "formula": NASTY,
    }))  # fmt: skip
    (path / "config.toml").write_text(f"[learner]\nbatch_size = 1  # {NASTY[:-6]}\n['{'<b>'}']\nx = '<i>'  # <u>\n")
    (path / "summary.json").write_text(
        json.dumps({"wall_s": 3.0, "bottleneck": NASTY, "time_split": {NASTY: 0.5}, "restarts": NASTY})
    )
    (path / "live.jpg").write_text(NASTY)
    found = parsed(html_report.make([path, make_run("good")]))
    assert parsed(html_report.make([path])).tags.isdisjoint({"img", "script", "b", "u"})
    assert any("<script>alert(1)</script>" in text for text in found.said)
    assert not any(mark in text for text in found.said for mark in "\u202e\x1b")


def test_the_summary_of_an_earlier_session_is_left_out(make_run):
    path = make_run("a")
    for wall_s, told in ((3.0, True), (2.0, False)):
        (path / "summary.json").write_text(json.dumps({"wall_s": wall_s, "bottleneck": "the samplers"}))
        assert ("the samplers" in parsed(html_report.make([path])).said) is told


@pytest.mark.parametrize("run", ["{}", "[]", '{"wall_s": "x", "eval_best": 1e999, "updates": 1' + "0" * 400 + "}"])
def test_a_run_that_is_damaged_or_has_only_begun_gives_a_report_all_the_same(tmp_path, run):
    (tmp_path / "run.json").write_text(run)
    (tmp_path / "config.toml").write_text("[learner\n")
    (tmp_path / "tune.json").write_text('{"update_rates": [3, {"stage": "rollout", "score": 1' + "0" * 400 + "}]}")
    (tmp_path / "live.jpg").symlink_to("/dev/zero")
    assert "No evaluation has ended yet." in parsed(html_report.make([tmp_path])).said


def test_infinite_and_equal_values_are_drawn(make_run):
    path = make_run("flat", 1e300)
    writer = MetricsWriter(path / "metrics.db")
    writer.write(3.0, 30, {"updates_per_s": 1e308})
    writer.evaluation(EvaluationRow(3.0, 30, 3, 1, 3, 0, float("inf"), 0.0, 5.0))
    writer.close()
    attributes = parsed(html_report.make([path])).attributes
    places = [value for name, value in attributes if name in ("points", "x", "y", "y1")]
    assert places
    assert not any("nan" in value or "inf" in value for value in places)


def test_the_command_writes_the_file_and_says_what_it_cannot(make_run, tmp_path, capsys):
    make_run("a")
    out = tmp_path / "out.html"
    args = ["--runs-dir", str(tmp_path), "--json"]
    assert report(["a", "latest", *args, "--out", str(out)]) == 0
    assert json.loads(capsys.readouterr().out) == {"report": str(out), "runs": ["a"], "bytes": out.stat().st_size}
    assert report(["b", *args]) == 2
    assert "no run 'b'" in capsys.readouterr().err
    assert report(["a", *args, "--out", str(tmp_path / "no" / "out.html")]) == 2
    assert "no such directory" in capsys.readouterr().err


def test_more_runs_than_fit_are_refused():
    with pytest.raises(ConfigError, match="a report of 61 runs: from 1 to 60"):
        html_report.make([SAMPLE] * 61)


def test_a_report_tells_the_times_to_a_target_and_the_centre_that_were_asked_for(make_run, tmp_path, monkeypatch):
    paths = [make_run(name, level) for name, level in zip("abcd", (1.0, 2.0, 3.0, 10.0), strict=True)]
    found = parsed(html_report.make(paths, targets={"Pendulum-v1": 3.0}, robust=True))
    assert found.said[found.said.index("first at 3") : found.said.index("first at 3") + 3] == [
        "first at 3",
        "held",
        "mean of 10 or end at 3",
    ]
    assert "0:00 [0:00, 0:02]" in found.said, "after 2, 1, 0 and 0 s: the middle two of four"
    assert "- (0 of 4)" in found.said, "three evaluations are no five"
    assert any("the interquartile mean over the runs" in words for words in found.said)
    monkeypatch.chdir(tmp_path)
    assert report(["a", "b", "--runs-dir", str(tmp_path), "--target", "3", "--centre", "iqm"]) == 0
    assert "first at 3" in parsed((tmp_path / "report.html").read_text()).said


def test_runs_of_a_sweep_are_parted_by_what_it_varies_and_no_other_experiment_by_it(make_run):
    paths = [make_run(name, 1.0) for name in "ab"]
    name = "evaluation.episodes"
    config = paths[0] / "config.toml"
    config.write_text(re.sub(r"(?m)^episodes = \d+", "episodes = 3", config.read_text()))
    together, split_by_settings = (set(parsed(html_report.make(paths, also=also)).said) for also in ((), (name,)))
    assert "Settings in which they differ" not in together
    assert {name, "Settings in which they differ"} <= split_by_settings
    assert any(words.endswith(f"{name}=3") for words in split_by_settings)


def test_sources_are_read_back_as_they_were_written():
    settings = resolve([Layer("profile x", {"env": {"id": "A  # b"}}), Layer("user", {"learner": {"threads": 2}})])
    found = sources_of(to_toml(settings))
    assert {key: source for key, source in found.items() if source != "default"} == settings.sources
    assert found["stop.seconds"] == "default"


@pytest.mark.parametrize(("low", "high", "expected"), [
    (0.0, 10.0, [0, 2, 4, 6, 8, 10]), (-1540.0, -100.0, [-1500, -1000, -500]), (0.0, 0.07, [0, 0.02, 0.04, 0.06]),
    (3.0, 3.0, [3.0]), (0.0, float("inf"), [0.0]),
])  # fmt: skip
def test_ticks_are_round_numbers(low, high, expected):
    assert html_report.ticks(low, high) == pytest.approx(expected)


def test_a_report_of_one_run_judges_its_learning_where_it_has_the_numbers(make_run):
    path = make_run("r1")
    assert "Is it healthy" not in html_report.make([path])
    writer = MetricsWriter(path / "metrics.db")
    writer.write(9.0, 9, {"dead_units": 0.95})
    writer.close()
    said = parsed(html_report.make([path])).said
    place = said.index("Dead units")
    assert said[place + 1 : place + 3] == ["95 %", "amber"]
    assert "layer norm" in said[place + 3]
