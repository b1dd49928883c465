"""The live view of a run: a panel in a terminal, otherwise a plain line every few seconds.

Text of other processes is shown without control characters. A broken stream (closed pipe, terminal gone) silences the
view and never stops a run.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from spreeze.formatting import DASH, clean, duration, number, percent, printable, size, whole
from spreeze.machine.output import BackgroundWriter, silence, write
from spreeze.metrics import tuning_record
from spreeze.metrics.snapshot import LOADS_S, Snapshot

_WAIT, _WAIT_COLOUR, _COLOURS = "wait", "bright_black", ("cyan", "green", "yellow", "magenta", "blue")
"""Colours of the parts of a worker's time, in order; waiting comes last."""
_SPARKS = "▁▂▃▄▅▆▇█"
_ASCII_SPARKS = "_.-=+*#@"
_MAX_WIDTH = 120
_PLAIN_WIDTH = 118  # columns if the output is not a terminal
_EVERY_S = 10.0  # between two lines of a plain view
_LEAVE_S = 0.3  # longest wait for the terminal before Ctrl-Z stops the run


def open_view(*, json_mode: bool = False) -> PlainView | TerminalView:
    """The view that fits standard output; in JSON mode a plain view on stderr."""
    if json_mode:
        return PlainView(sys.stderr)
    return TerminalView(Screen(file=sys.stdout)) if sys.stdout.isatty() else PlainView(sys.stdout)


class Screen(Console):
    """A console for untrusted text, without escape sequences and markup; unlike rich's, it survives a broken pipe."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Cleans all text; rich's own control segments (cursor movements) are kept."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    def on_broken_pipe(self) -> None:
        self.quiet = True


class PlainView:
    """Prints one line every few seconds."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._shown_s: float | None = None
        self._last: Snapshot | None = None
        self._error_shown = False

    def update(self, snapshot: Snapshot) -> None:
        if snapshot.first_error is not None and not self._error_shown:
            self._error_shown = True
            self.note(f"ERROR in {snapshot.first_error[0]}: {snapshot.first_error[1]}")
        now_s = self._clock()
        self._last = snapshot
        if self._shown_s is None or now_s - self._shown_s >= _EVERY_S:
            self._shown_s = now_s
            self.close()

    def note(self, text: str) -> None:
        write(self._stream, clean(text, 2000) + "\n")

    def leave(self) -> None:
        """Does nothing: its lines leave the terminal as it was."""

    def close(self) -> None:
        """Prints the latest state if it has not been shown."""
        if self._last is not None:
            self.note(plain_line(self._last))
            self._last = None


class TerminalView:
    """A panel that is redrawn in place with every update."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._broken = self._busy = False
        self._live = self._new_live()

    def _new_live(self) -> Live:
        return Live(console=self._console, auto_refresh=False, vertical_overflow="crop", transient=False)

    def leave(self) -> None:
        """Leaves panel and cursor on the screen; the next ``update`` starts below. Signal handlers may call it."""
        if self._busy:  # in the middle of a panel
            return
        self._guarded(self._live.stop)
        self._live = self._new_live()
        if isinstance(file := self._console.file, BackgroundWriter):
            file.drain(within_s=_LEAVE_S)

    def update(self, snapshot: Snapshot) -> None:
        self._guarded(lambda: self._redraw(snapshot))

    def note(self, text: str) -> None:
        self._guarded(lambda: self._console.print(Text(clean(text, 2000))))

    def close(self) -> None:
        """Leaves the last panel on the screen."""
        with contextlib.suppress(OSError, ValueError):  # the terminal may be gone; stop() also restores sys.stdout
            self._live.stop()

    def _redraw(self, snapshot: Snapshot) -> None:
        if getattr(self._console.file, "behind", False):  # the terminal reads too slowly, or not at all
            return
        if not self._live.is_started:
            self._live.start()
        ascii_only = not self._console.encoding.lower().startswith("utf")
        picture = panel(snapshot, self._console.width, ascii_only=ascii_only)
        self._live.update(picture, refresh=True)

    def _guarded(self, action: Callable[[], Any]) -> None:
        if self._broken:
            return
        self._busy = True
        try:
            action()
        except (OSError, ValueError):  # the terminal is gone
            self._broken = True
            silence(self._console.file)
        finally:
            self._busy = False


def plain_line(snapshot: Snapshot) -> str:
    parts = [
        f"{duration(snapshot.wall_s)} {snapshot.state}",
        f"env steps {number(snapshot.env_steps)} ({number(snapshot.env_steps_per_s)}/s)",
        f"updates {number(snapshot.updates)} ({number(snapshot.updates_per_s)}/s, "
        f"{number(snapshot.update_frames_per_s)} update frames/s)",
        f"samples/insert {number(snapshot.samples_per_insert)}",
        f"return {number(snapshot.eval_return)} (best {number(snapshot.eval_best)}, "
        f"mean of ten {number(snapshot.eval_final)})",
        f"cpu {percent(snapshot.cpu_use)}",
    ]
    if snapshot.env_errors:
        parts.append(f"env errors {snapshot.env_errors}")
    if snapshot.samplers_paused:
        parts.append(_active(snapshot))
    parts += _more(snapshot)
    parts += [f"gpu{gpu.index} {percent(gpu.use)}" for gpu in snapshot.gpus]
    return " | ".join(filter(None, [*parts, snapshot.time_left]))


def _more(snapshot: Snapshot) -> list[str]:
    """The other numbers of the mode: ``host_env_steps_per_s/0`` is shown as "host env steps/s (0)"."""
    texts = []
    for name, value in snapshot.more:
        metric, _, part = name.partition("/")
        label = metric.replace("_per_s", "/s").replace("_", " ")
        texts.append(f"{label}{f' ({part})' if part else ''} {number(value)}")
    return texts


def panel(snapshot: Snapshot, width: int, ascii_only: bool = False) -> Panel:
    """The whole panel; ``width`` in columns, at least 40."""
    inner = max(36, min(width, _MAX_WIDTH) - 4)
    rows: list[RenderableType] = []
    if snapshot.first_error is not None:
        name, text = snapshot.first_error
        rows.append(Text(f"first error, in {clean(name, 40)}: {clean(text, 300)}", style="bold red"))
    rows += [
        _health(snapshot),
        _rates(snapshot, inner),
        _split("samplers", snapshot.sampler_shares, inner, ascii_only),
        _split("learner", snapshot.learner_shares, inner, ascii_only),
        *_machine(snapshot, inner, ascii_only),
        _returns(snapshot, inner, ascii_only),
    ]
    if snapshot.more:
        rows.append(Text("  ".join(_more(snapshot))))
    if snapshot.bottleneck:
        rows.append(Text(clean(snapshot.bottleneck), style="italic"))
    if snapshot.progress is not None:
        text = f" {snapshot.time_left}"
        rows.append(_labeled("progress", _bar(snapshot.progress, inner - 10 - len(text), "cyan", ascii_only), text))
    rows += [Text(clean(event, 200), style="dim", overflow="ellipsis", no_wrap=True) for event in snapshot.events[-3:]]
    style = "red" if snapshot.first_error else ""
    return Panel(Group(*rows), title=Text("spreeze"), width=inner + 4, border_style=style)


def _health(snapshot: Snapshot) -> Text:
    samplers = f"samplers {whole(snapshot.samplers_alive)}/{whole(snapshot.samplers_wanted)}"
    restarts = f"restarts {snapshot.restarts}"
    return Text.assemble(
        (clean(snapshot.state, 40), "bold green" if snapshot.first_error is None else "bold red"),
        f"  {clean(snapshot.env_id, 60)}  {clean(snapshot.algo, 20)}  {duration(snapshot.wall_s)}  ",
        (samplers, "" if snapshot.samplers_alive == snapshot.samplers_wanted else "yellow"), "  ",
        (restarts, "yellow" if snapshot.restarts else ""),
        (f"  env errors {snapshot.env_errors}" if snapshot.env_errors else "", "yellow"),
        (f"  {_active(snapshot)}" if snapshot.samplers_paused else "", "yellow"),
    )  # fmt: skip


def _active(snapshot: Snapshot) -> str:
    """Number of active samplers while the governor pauses others."""
    return (
        f"{number(snapshot.samplers_active)} of {whole(snapshot.samplers_wanted)} samplers active, other programs "
        f"keep {number(snapshot.external_cpu_cores)} cores (mean of {LOADS_S:g} s)"
    )


def _rates(snapshot: Snapshot, inner: int) -> Table:
    cells = (
        ("env steps", number(snapshot.env_steps)), ("env steps/s", number(snapshot.env_steps_per_s)),
        ("updates", number(snapshot.updates)), ("updates/s", number(snapshot.updates_per_s)),
        ("samples/insert", number(snapshot.samples_per_insert)),
        ("upd. frames/s", number(snapshot.update_frames_per_s)),
        ("policy lag", number(snapshot.policy_lag)), ("row age", number(snapshot.transition_age)),
    )  # fmt: skip
    pairs = 4 if inner >= 90 else 2
    table = Table.grid(padding=(0, 1))
    for _ in range(pairs):
        table.add_column(style="dim", no_wrap=True, min_width=14)
        table.add_column(justify="right", no_wrap=True, style="bold", min_width=8)
    for first in range(0, len(cells), pairs):
        table.add_row(*(text for cell in cells[first : first + pairs] for text in cell))
    return table


def _split(name: str, shares: dict[str, float], inner: int, ascii_only: bool) -> Text:
    """A bar of a worker's time split, with a legend below it."""
    if not shares:
        return _labeled(name, Text(DASH), "")
    width = inner - 10
    bar, drawn, total = Text(), 0, 0.0
    names = sorted(shares, key=lambda part: part == _WAIT)
    parts = [(part, _WAIT_COLOUR if part == _WAIT else _COLOURS[i % len(_COLOURS)]) for i, part in enumerate(names)]
    for part, style in parts:
        total += shares[part]
        end = min(width, round(total * width))
        letter = part[0].upper() if part != _WAIT else "."
        bar.append((letter if ascii_only else "█") * max(0, end - drawn), style=style)
        drawn = max(drawn, end)
    legend = Text("\n" + " " * 10)
    columns_left = width
    for part, style in parts:
        text = f"{part} {percent(shares[part])}  ".replace(" %", "%")
        if len(text) <= columns_left + 2:
            legend.append(text[:columns_left], style=style)
            columns_left -= len(text)
    return Text.assemble(_labeled(name, bar, ""), legend)


def _machine(snapshot: Snapshot, inner: int, ascii_only: bool) -> list[Text]:
    sparks = _ASCII_SPARKS if ascii_only else _SPARKS
    cores = "".join(sparks[min(7, int(8 * max(0.0, use)))] for use in snapshot.core_uses[: max(0, inner // 3)])
    lines = [_use_line("cpu", snapshot.cpu_use, f"  {cores}" if cores else "", inner, ascii_only)]
    used = None
    if snapshot.memory_used_bytes is not None and snapshot.memory_total_bytes:
        used = snapshot.memory_used_bytes / snapshot.memory_total_bytes
    lines.append(_use_line("memory", used, f"  {size(snapshot.memory_used_bytes)}", inner, ascii_only))
    if snapshot.lag is None:
        lines.append(_use_line("replay", snapshot.replay_fill, "", inner, ascii_only))
    gpus = (_use_line(f"gpu {gpu.index}", gpu.use, f"  {gpu.figures}", inner, ascii_only) for gpu in snapshot.gpus[:4])
    return [*lines, *gpus]


def _use_line(name: str, use: float | None, extra: str, inner: int, ascii_only: bool) -> Text:
    text = f" {percent(use):>5}{extra}"
    style = "green" if use is None or use < 0.85 else "yellow"
    return _labeled(name, _bar(use, max(6, min(30, inner - 10 - len(text))), style, ascii_only), text)


def _labeled(name: str, content: Text, after: str) -> Text:
    return Text.assemble((f"{name:<10}", "dim"), content, after)


def _bar(fraction: float | None, width: int, style: str, ascii_only: bool) -> Text:
    full = 0 if fraction is None else round(min(1.0, max(0.0, fraction)) * max(4, width))
    signs = ("#", ".") if ascii_only else ("█", "░")
    return Text.assemble((signs[0] * full, style), (signs[1] * (max(4, width) - full), "bright_black"))


def _returns(snapshot: Snapshot, inner: int, ascii_only: bool) -> Text:
    line = Text.assemble(
        ("return    ", "dim"), (number(snapshot.eval_return), "bold"), f"  best {number(snapshot.eval_best)}"
        f"  mean of ten {number(snapshot.eval_final)}  samplers' {number(snapshot.episode_return)}  "
    )  # fmt: skip
    return line.append(sparkline(snapshot.eval_returns, max(0, min(30, inner - len(line))), ascii_only), style="cyan")


def sparkline(values: Sequence[float], width: int, ascii_only: bool = False) -> str:
    """The newest ``width`` values as a sparkline; a constant series is a low line."""
    sparks = _ASCII_SPARKS if ascii_only else _SPARKS
    shown = [value for value in values if value == value and abs(value) != float("inf")][-width:] if width else []
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = 7 / (high - low) if high > low else 0.0
    return "".join(sparks[round((value - low) * scale)] for value in shown)


def show_tuning(record: dict[str, Any], stream: TextIO, *, reasons: bool) -> None:
    """Prints every trial and the limits of the choice; with ``reasons`` also the choice itself."""
    screen = Screen(file=stream, width=None if stream.isatty() else _PLAIN_WIDTH, highlight=False)
    tuning, choice = tuning_record.of_record(record), record["choice"]
    for title, rows in tuning.stages:
        screen.print(_trial_table(title, tuning.table(rows)))
    lines = [f"objective {record['objective']}: {record['formula']}"]
    if reasons:
        lines += [f"{name} = {choice[name]}: {reason}" for name, reason in record["reasons"].items()]
    if record.get("paper_batch_size"):
        lines.append(f"(the Spreeze paper's rule would choose batch size {record['paper_batch_size']})")
    lines += [f"limit: {text}" for text in record["limits"]] + [f"note: {text}" for text in record["notes"]]
    for line in lines:
        screen.print(f"  {clean(line, 1000)}", soft_wrap=True)


def _trial_table(title: str, lines: list[dict[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in lines[0]:
        table.add_column(name, justify="left" if name in ("device", "note") else "right", no_wrap=name != "note")
    for line in lines:
        table.add_row(*line.values())
    return table
