"""What finished runs reached and kept, and a picture of their curves: ``python tests/benchmarks/curve.py RUN RUN``."""

import argparse
import math
from pathlib import Path

import common
from figures import line
from whole_runs import CURVE_AXES, curve_rows, draw_curve

from spreeze.run_directory import find_run

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", help="run names or paths, or latest")
    parser.add_argument("--runs-dir", default="runs")
    parser.add_argument("--out", default="curve.png", help="picture to write")
    parser.add_argument("--axes", default=CURVE_AXES, nargs="+", choices=CURVE_AXES)
    parser.add_argument("--target-return", default=(), type=float, nargs="+", metavar="R", help="timed, first and held")
    parser.add_argument("--updates", default=math.inf, type=float, help="only evaluations up to so many updates")
    args = parser.parse_args()
    runs = [find_run(run, Path(args.runs_dir)) for run in args.runs]
    rows = curve_rows(runs, args.target_return, args.updates)
    draw_curve(runs, Path(args.out), args.axes)
    common.say("\n".join(map(line, rows)))
