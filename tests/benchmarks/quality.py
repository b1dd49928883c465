"""Measures how far Spreeze can be trusted, and writes ``assets/docs/quality.md`` from all that was measured.

::

    python tests/benchmarks/quality.py faults --faults 1000 --seed 1      # runs of 100 faults each (Linux)
    python tests/benchmarks/quality.py faults --count 10000 --minutes 60  # again and again, until there are so many
    python tests/benchmarks/quality.py faults --faults 100 --hosts        # samplers on another host, partitions too
    python tests/benchmarks/quality.py flaky tests/unit/runtime --repeats 20 --load 2
    python tests/benchmarks/quality.py suite                              # time of the quick suite
    python tests/benchmarks/quality.py page                               # the page alone

Each adds a line to ``assets/quality.jsonl``; ``--no-record`` only prints it. ``--count`` goes on with the line of an
earlier call and its next seed, and writes it after each run: a call may be ended at any time. A storm that fails is
shrunk to a short history with ``--shrink``, which plays it again and again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from common import SUPPORT

from spreeze.files import replace_bytes
from spreeze.machine.hardware import read_machine
from spreeze.run_directory import versions

ROOT = Path(__file__).resolve().parents[2]
RECORDS, PAGE = ROOT / "assets" / "quality.jsonl", ROOT / "assets" / "docs" / "quality.md"
HISTORY_FAULTS = 100
Record = dict[str, Any]
_HEAD = """# Quality

What was measured of Spreeze's reliability, line by line in `assets/quality.jsonl`. `python tests/benchmarks/quality.py`
measures and writes this page; nothing here is written by hand. [Developing](developing.md#storms-and-soaks) says how.
"""


def throw_faults(args: argparse.Namespace) -> Record:
    """Plays runs, seed by seed, until so many faults were thrown or the time is over; with ``count`` writes each."""
    sys.path.insert(0, str(SUPPORT))
    os.environ["SPREEZE_LONG_TESTS"] = "1"  # who does nothing for a minute is hung
    from fault_storm import LEFT_OUT, Storm, history, shrunk

    record: Record = {
        "kind": "faults", "seed": args.seed, "count": args.count, "left_out": "" if args.hosts else LEFT_OUT,
        "thrown": {}, "violations": [],
        "histories": 0, "rows": 0, "checkpoints": 0, "sessions": 0, "minutes": 0.0,
    }  # fmt: skip
    record = next((one for one in _records() if args.count and _history(one) == _history(record)), record)
    end_s, wanted = time.monotonic() + 60.0 * args.minutes, args.count or args.faults
    with tempfile.TemporaryDirectory(prefix="storm-") as folder:
        while (left := wanted - _single(record.get("thrown", {}))) > 0 and time.monotonic() < end_s:
            seed = record["seed"] + record["histories"]
            storm = Storm(Path(folder), print if args.verbose else lambda text: None, hosts=args.hosts)
            faults = history(seed, min(HISTORY_FAULTS, left), hosts=args.hosts)
            report = storm.play(faults, (end_s - time.monotonic()) / 60.0)
            record = _with_run(record, seed, report)
            if args.count and not args.no_record:
                write_record(record)
            print(f"seed {seed}: {_single(report.thrown)} faults, {report.violations}", flush=True)
            if report.violations and args.shrink:
                short = shrunk(
                    report.history, lambda some: bool(Storm(Path(folder), hosts=args.hosts).play(some).violations)
                )
                print("  short history:", *short, sep="\n    ", flush=True)
    return record


def _with_run(record: Record, seed: int, report: Any) -> Record:
    """A record of faults, with one more run in it and the commits that were tried."""
    stamp, commits = _stamp(), str(record.get("commit", "")).split()
    sums = {"histories": 1, "rows": report.rows_checked, "checkpoints": report.checkpoints_checked,
            "sessions": report.sessions, "minutes": report.minutes}  # fmt: skip
    seen = [f"seed {seed}: {name}: {text}" for name, text in report.violations]
    return record | stamp | {name: record[name] + more for name, more in sums.items()} | {
        "thrown": dict(sorted((Counter(record["thrown"]) + report.thrown).items())),
        "violations": record["violations"] + seen,
        "commit": " ".join(commits if stamp["commit"] in commits else [*commits, stamp["commit"]]),
    }  # fmt: skip


def _history(record: Record) -> tuple[Any, ...] | None:
    """What tells a history that goes on from others; None for records of one call."""
    return tuple(map(record.get, ("kind", "count", "seed", "left_out"))) if record.get("count") else None


def _single(thrown: Mapping[str, int]) -> int:
    """Number of faults; ``two`` counts pairs of these."""
    return sum(thrown.values()) - thrown.get("two", 0)


@contextlib.contextmanager
def load(processes: int) -> Iterator[None]:
    """So many processes that keep a core busy meanwhile."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: sum(range(1000))"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def _pytest(*arguments: str) -> tuple[dict[str, str], float]:
    """Outcome of each test (passed, failed, skipped), and the seconds that all took."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *arguments]
        done = subprocess.run(
            command, cwd=ROOT, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if not report.exists():
            raise SystemExit(f"pytest ended with code {done.returncode} without a report: {done.stdout[-2000:]}")
        found = {}
        for case in xml.etree.ElementTree.parse(report).iter("testcase"):
            bad = case.find("failure") is not None or case.find("error") is not None
            found[f"{case.get('classname')}::{case.get('name')}"] = (
                "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
            )
        if "failed" in found.values():
            print(done.stdout[-6000:], flush=True)
    return found, time.monotonic() - began_s


def repeat_tests(args: argparse.Namespace) -> Record:
    """Repeats a choice of tests, beside a load if asked."""
    outcomes, loads, began_s = defaultdict[str, Counter[str]](Counter), [0.0], time.monotonic()
    with load(args.load):
        for number in range(args.repeats):
            found, seconds = _pytest("-n", str(args.processes), *args.tests)
            loads.append(os.getloadavg()[1])
            for test, outcome in found.items():
                outcomes[test][outcome] += 1
            print(f"{number + 1}: {len(found)} tests, {Counter(found.values())}, {seconds:.0f} s", flush=True)
    failed = {test: count["failed"] for test, count in outcomes.items() if count["failed"]}
    runs = sum(count["failed"] + count["passed"] for count in outcomes.values())
    return {
        "kind": "flaky", "chosen": args.tests, "tests": len(outcomes), "repeats": args.repeats, "load": args.load,
        "machine_load": max(loads),
        "runs": runs, "failed": failed, "minutes": (time.monotonic() - began_s) / 60.0,
    }  # fmt: skip


def time_suite(args: argparse.Namespace) -> Record:
    """Runs the quick suite once."""
    found, seconds = _pytest()
    return {"kind": "suite", "minutes": seconds / 60.0, **Counter(found.values())}


def _records() -> list[Record]:
    lines = RECORDS.read_text(encoding="utf-8").splitlines() if RECORDS.exists() else []
    return [json.loads(line) for line in lines]


def write_record(record: Record) -> None:
    """Adds a line, in place of the earlier one of a history that goes on, and writes the page."""
    kept = [one for one in _records() if _history(one) is None or _history(one) != _history(record)]
    replace_bytes(RECORDS, "".join(json.dumps(one) + "\n" for one in (*kept, record)).encode())
    write_page()


def write_page() -> None:
    """Writes the page from all records."""
    records: dict[str, list[Record]] = defaultdict(list)
    for record in _records():
        records[record["kind"]].append(record)
    parts = [_HEAD, _faults_part(records["faults"]), _flaky_part(records["flaky"]), _suite_part(records["suite"])]
    PAGE.write_text("\n".join(part for part in parts if part), encoding="utf-8")


def _table(title: str, about: str, head: str, rows: list[list[Any]]) -> str:
    if not rows:
        return ""
    titles = head.split(" | ")
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join((f"## {title}\n", about, "", *(f"| {' | '.join(map(str, line))} |" for line in lines), ""))


def _where(record: Record) -> list[str]:
    return [record["date"], record["commit"], record["machine"], record["versions"]]


def _faults_part(records: list[Record]) -> str:
    rows = [
        [f"{_single(r['thrown']):,}" + (f" of {r['count']:,}" if r.get("count") else ""),
         ", ".join(f"{kind} {count}" for kind, count in r["thrown"].items()),
         f"{r['sessions']} in {r['minutes']:.0f} minutes", f"{r['rows']:,}", r["checkpoints"],
         "; ".join(text[:160].replace("|", "/").replace("\n", " ") for text in r["violations"]) or "0", *_where(r)]
        for r in records
    ]  # fmt: skip
    about = (
        "Faults thrown at real runs, and violations of eight invariants that a checker outside of the run saw. A "
        "run ends with its first violation. Two: pairs of the other faults at once. Rows and checkpoints: looks at "
        "them. Partitions: where a run has samplers on another host."
    )
    head = "faults | of each kind | sessions | rows | checkpoints | violations | date | commit | machine | versions"
    return _table("Faults", about, head, rows)


def _flaky_part(records: list[Record]) -> str:
    rows = [
        [" ".join(f"`{test}`" for test in r["chosen"]), r["tests"], r["repeats"],
         f"{r['load']}, {r['machine_load']:.0f}",
         f"{sum(r['failed'].values())} of {r['runs']} ({sum(r['failed'].values()) / max(1, r['runs']):.2%})",
         "<br>".join(f"`{test}` {count}" for test, count in r["failed"].items()) or "none", *_where(r)]
        for r in records
    ]  # fmt: skip
    about = (
        "Tests that were repeated. Load: processes of ours that kept a core busy, and the highest load average of five "
        "minutes, other programs of the machine included."
    )
    head = "chosen | tests | repeats | load | failed | which | date | commit | machine | versions"
    return _table("Flaky tests", about, head, rows)


def _suite_part(records: list[Record]) -> str:
    rows = [
        [f"{r['minutes']:.1f} minutes", r.get("passed", 0), r.get("failed", 0), r.get("skipped", 0), *_where(r)]
        for r in records
    ]
    head = "time | passed | failed | skipped | date | commit | machine | versions"
    return _table("Quick suite", "`python -m pytest`, once.", head, rows)


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=False, capture_output=True, text=True)
    return done.stdout.strip()


def _stamp() -> Record:
    written = (f":!{path.relative_to(ROOT).as_posix()}" for path in (RECORDS, PAGE) if path.is_relative_to(ROOT))
    told, changed = versions(), _git("status", "--porcelain", "-uno", ".", *written)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": (_git("describe", "--always", "--exclude=*") or "-") + ("-dirty" if changed else ""),
        "machine": read_machine().one_line(),
        "versions": f"Python {platform.python_version()}, torch {told.get('torch')}, NumPy {told.get('numpy')}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    faults, flaky, suite, _ = map(verbs.add_parser, ("faults", "flaky", "suite", "page"))
    faults.add_argument("--faults", type=int, default=1000)
    faults.add_argument("--count", type=int, help="go on with the history of this seed until it has so many")
    faults.add_argument("--seed", type=int, default=1, help="of the first run")
    faults.add_argument("--hosts", action="store_true", help="samplers on another host, too (root, Ray)")
    faults.add_argument("--minutes", type=float, default=60.0, help="no more after that")
    faults.add_argument("--shrink", action="store_true", help="make failing histories short")
    faults.add_argument("--verbose", action="store_true", help="print each fault")
    faults.set_defaults(measure=throw_faults)
    flaky.add_argument("tests", nargs="+", help="as pytest takes them")
    flaky.add_argument("--repeats", type=int, default=20)
    flaky.add_argument("--load", type=int, default=0, help="processes that keep a core busy each")
    flaky.add_argument("--processes", type=int, default=1, help="of pytest")
    flaky.set_defaults(measure=repeat_tests)
    suite.set_defaults(measure=time_suite)
    for verb in (faults, flaky, suite):
        verb.add_argument("--no-record", action="store_true", help="print the result, write nothing")
    args = parser.parse_args()
    if args.verb != "page":
        record = _stamp() | args.measure(args)
        print(json.dumps(record))
        if not args.no_record:
            write_record(record)
    else:
        write_page()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a storm ends its run
    main()
