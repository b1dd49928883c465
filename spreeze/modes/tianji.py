"""The TianJi mode (arXiv 2502.20190): groups of samplers, data and learner, whose learners average their parameters.

What produces and what consumes trigger each other by data, and as many rows are consumed for each produced one as in
mode serial (Eq. 3). With replay the limiter holds this ratio, and the governor lets as many samplers work as the
learner needs. On-policy learners take each row once from one of two storages, which holds it by construction. No part
is new: with replay the wiring is that of mode spreeze, else of mode hts, and of mode gala where there are several
learners.

The paper's controller is three parts of this house. Each decides what the others take as given, and says why:

========  ======================  ================================================================================
tuner     before a run            how many samplers there are, their environments and the batch: cores for M_A and M_L
governor  once a second           how many of these samplers work: no more than the learner needs, more if it waits
limiter   at each row and update  who may go on, so that TR_L / TR_A is the serial value, whatever the two decided
========  ======================  ================================================================================

So the ratio does not depend on a good choice of the others; a bad one costs speed alone. Staleness P = B_s / N_s
follows: the batch is fixed, and replay is full or grows as in mode serial.
"""

from __future__ import annotations

from spreeze.modes import gala, hts, spreeze
from spreeze.run_directory import RunDir
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.launcher import FRESH, Launcher
from spreeze.runtime.plan import RunPlan
from spreeze.runtime.recorder import Outcome, View


def run_mode(plan: RunPlan, run_dir: RunDir, view: View, interrupts: Interrupts, launcher: Launcher = FRESH) -> Outcome:
    """Trains until a stop condition or an interrupt; a ResourceError if there is no room for the rows."""
    if plan.config.on_policy is None:
        return spreeze.run_mode(plan, run_dir, view, interrupts, launcher)
    several = plan.learners > 1 or plan.config.exchange.spans_hosts
    return (gala.run_mode if several else hts.run_mode)(plan, run_dir, view, interrupts, launcher)
