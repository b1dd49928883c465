"""What a run shows in a terminal, in a pipe, on a narrow screen, without Unicode, and when the screen is gone."""

import dataclasses
import errno
import io
import sys
import xml.etree.ElementTree

import pytest
from rich.console import Console

from spreeze import formatting
from spreeze.cli.terminal import PlainView, Screen, TerminalView, open_view, panel, plain_line, sparkline
from spreeze.metrics.snapshot import GpuSnapshot, Snapshot, snapshot_of

FULL = Snapshot(
    env_id="Walker2DBulletEnv-v0",
    algo="sac",
    state="training",
    wall_s=754.0,
    env_steps=1_234_567,
    env_steps_per_s=1921.4,
    updates=56_789,
    updates_per_s=81.2,
    update_frames_per_s=20_787.0,
    samples_per_insert=11.8,
    policy_lag=23.4,
    transition_age=250_000.0,
    replay_fill=0.42,
    eval_return=1240.5,
    eval_best=1301.2,
    eval_returns=(10.0, 50.0, 600.0, 1240.5),
    episode_return=980.1,
    cpu_use=0.97,
    core_uses=(1.0, 0.94),
    memory_used_bytes=2.1 * 2**30,
    memory_total_bytes=23.5 * 2**30,
    gpus=(GpuSnapshot(index=0, use=0.84, power_w=201.0, power_limit_w=350.0, memory_used_bytes=2.0**31),),
    sampler_shares={"policy": 0.12, "env": 0.70, "write": 0.01, "wait": 0.17},
    learner_shares={"wait": 0.02, "gather": 0.05, "critic": 0.60, "actor": 0.30, "publish": 0.03},
    bottleneck="Learner is the limit: it computes 98 % of its time.",
    samplers_alive=1,
    samplers_wanted=2,
    restarts=1,
    progress=0.31,
    eta_s=1800.0,
    first_error=("sampler-1", "ValueError: reward is [bold]nan\x1b[2J"),
    events=("one", "sampler-1 exited (SIGKILL)", "three", "four"),
)
EMPTY = Snapshot(env_id="Pendulum-v1", algo="td3")


def _text(snapshot, width=100, ascii_only=False):
    stream = io.StringIO()
    Console(file=stream, width=width, force_terminal=False).print(panel(snapshot, width, ascii_only))
    return stream.getvalue()


def test_panel_shows_every_number_with_its_name():
    text = _text(FULL)
    for words in (
        "training", "Walker2DBulletEnv-v0", "12:34", "samplers 1/2", "restarts 1", "1.23 M", "1921", "56.8 k", "81.2",
        "20.8 k", "11.8", "23.4", "250 k", "critic 60%", "env 70%", "97 %", "2.1 GiB", "42 %", "201 of 350 W", "1240",
        "best 1301", "▁▁▄█", "Learner is the limit", "31 %, 30:00 left", "four",
    ):  # fmt: skip
        assert words in text


def test_the_time_left_is_the_longest_where_a_return_may_end_the_run():
    found = dataclasses.replace(FULL, may_end_earlier=True)
    assert "31 %, at most 30:00 left" in _text(found)
    assert plain_line(found).endswith("31 %, at most 30:00 left")


@pytest.mark.parametrize(
    ("stop", "earlier"),
    [
        ({}, True),
        ({"seconds": 60.0}, False),
        ({"seconds": 60.0, "target_return": 1.0, "target_evaluations": 1}, True),
        ({"seconds": 60.0, "target_return": 1.0, "target_evaluations": 0}, False),
    ],
)
def test_a_return_that_is_only_reported_ends_nothing_earlier(stop, earlier):
    assert snapshot_of({}, {"stop": stop}, {}, None, state="running").may_end_earlier is earlier


def test_first_error_stands_at_the_top_with_its_process_and_is_plain_text():
    lines = _text(FULL).splitlines()
    assert "first error, in sampler-1: ValueError: reward is [bold]nan [2J" in lines[1]
    assert "\x1b" not in _text(FULL)


def test_errors_of_environments_are_counted_where_there_are_any():
    found = dataclasses.replace(FULL, env_errors=12)
    assert "env errors 12" in _text(found)
    assert "| env errors 12 |" in plain_line(found)
    assert "env errors" not in _text(dataclasses.replace(FULL, env_errors=0)) + plain_line(FULL)


def test_further_numbers_of_a_mode_are_told_in_words():
    more = (("hosts_alive", 2.0), ("host_env_steps_per_s/1", 300.0))
    snapshot = Snapshot(env_id="Pendulum-v1", algo="sac", more=more)
    for text in (plain_line(snapshot), _text(snapshot)):
        assert "hosts alive 2" in text
        assert "host env steps/s (1) 300" in text


def test_unknown_is_a_dash_and_never_zero():
    text = _text(EMPTY)
    assert "samplers -/-" in text
    assert "0 %" not in text
    assert " 0 " not in text.replace("restarts 0 ", "")


@pytest.mark.parametrize("width", [20, 40, 60, 79, 100, 200])
@pytest.mark.parametrize("snapshot", [FULL, EMPTY])
def test_no_line_is_wider_than_the_panel_at_any_width(snapshot, width):
    lines = _text(snapshot, width).splitlines()
    assert max(len(line) for line in lines) <= max(width, 40)
    assert len({len(line) for line in lines}) == 1


def test_terminal_without_unicode_gets_ascii():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    view = TerminalView(Console(file=stream, width=80, force_terminal=True))
    view.update(FULL)
    view.close()
    stream.flush()
    assert b"samplers" in raw.getvalue()


def test_notes_stay_above_the_panel_and_markup_in_them_is_text():
    stream = io.StringIO()
    view = TerminalView(Console(file=stream, width=80, force_terminal=True))
    view.note("batch 256: [why]")
    view.update(FULL)
    view.note("sampler-1 exited [/red]\x07")
    view.update(FULL)
    view.close()
    assert "batch 256: [why]" in stream.getvalue()
    assert "sampler-1 exited [/red]" in stream.getvalue()
    assert "\x07" not in stream.getvalue()


def test_a_shell_gets_the_terminal_with_its_cursor_and_a_new_panel_begins_below_afterwards():
    stream = io.StringIO()
    view = TerminalView(Console(file=stream, width=80, force_terminal=True))
    view.update(FULL)
    assert not stream.getvalue().endswith("\n"), "the cursor is within the panel"
    assert stream.getvalue().count("\x1b[?25l") == 1
    view.leave()
    assert stream.getvalue().endswith("\n\x1b[?25h")
    view.leave()  # once more, as after SIGCONT
    before = len(stream.getvalue())
    view.update(FULL)
    assert "\x1b[1A" not in stream.getvalue()[before:], "what the shell has written stays"
    view.update(FULL)
    assert "\x1b[1A" in stream.getvalue()[before:]
    view.close()


def test_plain_view_prints_a_line_every_ten_seconds():
    stream, now = io.StringIO(), [0.0]
    view = PlainView(stream, clock=lambda: now[0])
    for second in range(25):
        now[0] = float(second)
        view.update(EMPTY)
    assert len(stream.getvalue().splitlines()) == 3
    view.close()
    assert len(stream.getvalue().splitlines()) == 4


def test_plain_view_tells_the_first_error_at_once_and_once():
    stream = io.StringIO()
    view = PlainView(stream, clock=lambda: 0.0)
    view.update(EMPTY)
    view.update(FULL)
    view.update(FULL)
    assert stream.getvalue().count("ERROR in sampler-1: ValueError: reward is [bold]nan [2J") == 1


def test_plain_line_has_the_main_numbers():
    assert plain_line(FULL) == (
        "12:34 training | env steps 1.23 M (1921/s) | updates 56.8 k (81.2/s, 20.8 k update frames/s) | "
        "samples/insert 11.8 | return 1240 (best 1301, mean of ten -) | cpu 97 % | gpu0 84 % | 31 %, 30:00 left"
    )
    assert "env steps - (-/s)" in plain_line(EMPTY)


class _Broken(io.StringIO):
    def write(self, text):
        raise BrokenPipeError

    def isatty(self):
        return True


class _Dying(io.StringIO):
    gone = False

    def write(self, text):
        if self.gone:
            raise OSError(errno.EIO, "Input/output error")
        return super().write(text)

    def isatty(self):
        return True


def test_a_terminal_that_dies_while_it_shows_a_panel_gives_standard_output_back(monkeypatch):
    stream = _Dying()
    monkeypatch.setattr(sys, "stdout", stream)
    view = open_view()
    view.update(FULL)
    assert sys.stdout is not stream, "what is printed meanwhile goes above the panel"
    stream.gone = True
    view.update(FULL)
    view.note("hello")
    view.close()
    assert sys.stdout is stream


def test_stream_that_broke_never_stops_a_run():
    for view in (PlainView(_Broken()), TerminalView(Screen(file=_Broken(), force_terminal=True))):
        view.note("hello")
        view.update(FULL)
        view.update(FULL)
        view.close()


def test_view_fits_the_stream(capsys, monkeypatch):
    assert isinstance(open_view(), PlainView)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert isinstance(open_view(), TerminalView)
    view = open_view(json_mode=True)
    view.update(FULL)
    view.note("note")
    view.close()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "note" in captured.err
    assert "env steps" in captured.err


def export_svg(snapshot, width=100):
    """The panel as a picture; ``assets/terminal.svg`` is made by it."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(panel(snapshot, width))
    return console.export_svg(title="spreeze")


def test_svg_is_well_formed_and_shows_the_run():
    svg = export_svg(FULL)
    xml.etree.ElementTree.fromstring(svg)
    assert "Walker2DBulletEnv" in svg


def test_sparkline_scales_to_its_values():
    assert sparkline((0.0, 1.0, 2.0), 3) == "▁▅█"
    assert sparkline((5.0, 5.0), 3) == "▁▁"
    assert sparkline((1.0, float("nan"), 2.0), 9, ascii_only=True) == "_@"
    assert sparkline((), 5) == sparkline((1.0,), 0) == ""


def test_numbers_as_a_person_reads_them():
    numbers = (None, 0, 0.0123, 0.5, 12.34, 999, 9999, 14_900, 2.5e6, 3e9, float("nan"))
    texts = ["-", "0", "0.0123", "0.50", "12.3", "999", "9,999", "14.9 k", "2.50 M", "3.00 G", "-"]
    assert [formatting.number(value) for value in numbers] == texts
    assert [formatting.duration(value) for value in (None, 5, 3723, 90_061)] == ["-", "0:05", "1:02:03", "1 d 01:01"]
    assert [formatting.size(value) for value in (None, 12, 25.2e9)] == ["-", "12 B", "23.5 GiB"]
