"""The supervisor: hears the crew, samples the slots, decides when it is over."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

from spreeze.errors import WorkerError
from spreeze.rundir import RunDir
from spreeze.transport import board as words
from spreeze.transport.board import Board
from spreeze.transport.checkpoint import CheckpointStore
from spreeze.workers.crew import Crew
from spreeze.workers.gauges import Reading
from spreeze.workers.governing import Governing
from spreeze.workers.interrupts import Interrupts
from spreeze.workers.recorder import SAMPLE_S, Recorder

_LOOK_S = 0.05


class Supervisor:
    """Watches one run of processes from the first start to the last one's end."""

    def __init__(
        self, run_dir: RunDir, board: Board, crew: Crew, read: Callable[[], Reading], recorder: Recorder,
        interrupts: Interrupts, governing: Governing | None = None,
    ) -> None:
        """Args: ``read`` gives all counters of this moment; the board's stop word is set once they are the last."""
        self._run_dir, self._board, self._crew = run_dir, board, crew
        self._reading, self._recorder, self._interrupts = read, recorder, interrupts
        self._governing = governing
        self._learner_finished: str | None = None
        self._next_sample_s = 0.0
        self.stopping_s = 0.0
        """How long stopping the crew took."""

    def run(self, on_sample: Callable[[], None]) -> None:
        """Watches until a stop condition, an interrupt, or a failure that cannot be mended.

        Args:
            on_sample: called after each sample of the metrics, twice a second.
        """
        recorder = self._recorder
        try:
            while True:
                self._hear(self._crew.wait(_LOOK_S))
                self._hear(self._crew.watch())
                self._tell_hang_up()
                if time.monotonic() >= self._next_sample_s:
                    self._next_sample_s = time.monotonic() + SAMPLE_S
                    self._sample()
                    on_sample()
                reason = self._stop_reason()
                if reason is not None:
                    recorder.outcome.stopped_by = reason
                    return
        except WorkerError as error:
            recorder.outcome.stopped_by = "failure"
            recorder.outcome.error = str(error)
            recorder.event("error", str(error))

    def stop(self) -> None:
        """Ends the crew and takes the last numbers; nobody is left when it returns."""
        self._recorder.ending()
        start_s = time.monotonic()
        self._run_dir.write_state(state="stopping")
        try:
            self._crew.stop(hurry=lambda: self._interrupts.urgent, on_messages=self._hear, on_wait=self._waited)
        finally:
            self.stopping_s = time.monotonic() - start_s
            with contextlib.suppress(OSError):  # a checkpoint that was given up may be of gigabytes
                CheckpointStore(self._run_dir.path / "checkpoints").remove_unfinished()
            self._recorder.first_error = self._crew.first_error
            self._recorder.sample(self._reading(), pids=None, restarts=self._crew.restarts,
                                  samplers_alive=0, state="stopping")
            self._recorder.finish(self._crew.restarts)

    def _waited(self, names: list[str]) -> None:
        """Who stops waits for ``names``; what the learner still has to write is shown."""
        self._tell_hang_up()
        if "learner" in names:
            self._recorder.saving(int(self._reading().learner["checkpoint_left_bytes"]))

    def _tell_hang_up(self) -> None:
        if self._interrupts.hung_up:
            self._recorder.hung_up()

    def _stop_reason(self) -> str | None:
        if self._interrupts.count:
            return f"interrupt ({self._interrupts.cause})"
        return self._learner_finished or self._recorder.stop_reason()

    def _hear(self, messages: list[dict[str, Any]]) -> None:
        outcome = self._recorder.outcome
        for message in messages:
            kind, source = message.get("kind"), str(message.get("from", "?"))
            if kind == "event":
                self._recorder.event(str(message.get("level", "info")), str(message.get("text", ""))[:2000], source)
            elif kind == "error":
                self._crew.note_error(source, str(message.get("error", ""))[:1000])
            elif kind == "evaluation":
                self._recorder.evaluation(message)
            elif kind == "started":
                outcome.device = message.get("device")
            elif kind == "finished":
                outcome.parameters_sha256 = message.get("parameters_sha256")
                outcome.updates = int(message.get("updates", 0))
                self._learner_finished = str(message.get("reason") or "updates")

    def _sample(self) -> None:
        self._recorder.first_error = self._crew.first_error
        reading, pids = self._reading(), self._crew.pids()
        governed = self._governing.look(reading, {**pids, "supervisor": os.getpid()}) if self._governing else {}
        self._recorder.sample(reading, pids=pids, restarts=self._crew.restarts,
                              samplers_alive=self._crew.alive("sampler") + self._crew.alive("executor"),
                              governed=governed)
        paused = (self._run_dir.path / "control" / "pause-visualizer").exists()
        self._board.header[words.VISUALIZER_PAUSED] = int(paused)
