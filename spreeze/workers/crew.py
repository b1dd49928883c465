"""The crew: all worker processes of a run, watched, restarted and ended. No metrics, no modes."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil

from spreeze.errors import WorkerError
from spreeze.formats import size
from spreeze.metrics import DEADLINE_S, Phase
from spreeze.processes import DEATH_S, left_behind
from spreeze.strays import end_strays
from spreeze.transport import board as words
from spreeze.transport.board import Board
from spreeze.transport.wake import readable
from spreeze.workers.restarts import LIMITS, Restarts
from spreeze.workers.spawn import Child, Nest, Start, WorkerSpec, spawn

_ASLEEP_S = 5.0
"""A gap this long between two looks means that this process slept: nobody else is to blame."""
_STOP_S = 6.0
"""What a worker gets to end after the wish to stop."""
_LAST_WORK = (Phase.UPDATE, Phase.PUBLISH, Phase.CHECKPOINT)
"""Phases that lead to the learner's last checkpoint: it has as long as its heart beats as often as it must."""
_MEMORY_S = 1.0
"""Time between two looks at the workers' memory."""
_STACK_S = 0.2
"""What a hung worker gets to write its stack into its log before it is killed."""


@dataclass
class Post:
    """One place in the crew: its worker now, its failures so far."""

    spec: WorkerSpec
    restarts: Restarts
    child: Child | None = None
    finished: bool = False
    last_heartbeat: int = -1
    heartbeat_seen_s: float = 0.0
    failures: list[str] = field(default_factory=list)
    told: str | None = None
    """The error that its worker reported, heard before its end was seen."""


class Crew:
    """Starts, watches, restarts and stops workers.

    ``takeover(spec)`` is called after the old writer of a shard is certainly dead and before
    the new one starts.
    """

    def __init__(
        self, nest: Nest, board: Board, *, on_event: Callable[[str, str], None],
        takeover: Callable[[WorkerSpec], None] = lambda spec: None,
        start: Start = spawn, clock: Callable[[], float] = time.monotonic,
        forgiven: int = 0,
    ) -> None:
        self._nest, self._board = nest, board
        self.on_event, self._takeover, self._start, self._clock = on_event, takeover, start, clock
        self._forgiven = forgiven
        self.posts: dict[str, Post] = {}
        self.first_error: tuple[str, str] | None = None
        self._last_watch_s: float | None = None
        self._next_memory_s = 0.0

    def add(self, spec: WorkerSpec) -> None:
        """Starts a worker and keeps it running from now on.

        Raises:
            OSError: it could not be started (descriptor, process or memory limit).
        """
        post = Post(spec=spec, restarts=Restarts(LIMITS[spec.role], forgiven=self._forgiven))
        self.posts[spec.name] = post
        self._launch(post)

    def _launch(self, post: Post) -> None:
        self._board.control(post.spec.row)[words.PHASE] = int(Phase.START)
        post.child = self._start(post.spec, self._nest)
        post.last_heartbeat, post.heartbeat_seen_s, post.told = -1, self._clock(), None

    @property
    def restarts(self) -> int:
        """Workers started again so far."""
        return sum(post.restarts.total for post in self.posts.values())

    def alive(self, role: str) -> int:
        """Running workers of a role."""
        return sum(post.child is not None for post in self._of(role))

    def pids(self) -> dict[str, int]:
        """Name -> process id of the running workers."""
        return {name: post.child.pid for name, post in self.posts.items() if post.child is not None}

    def _of(self, role: str) -> list[Post]:
        return [post for post in self.posts.values() if post.spec.role == role]

    def wait(self, seconds: float) -> list[dict[str, Any]]:
        """Waits until a worker says something, at most ``seconds``; returns what was said."""
        children = [post.child for post in self.posts.values() if post.child is not None]
        by_fd = {child.message_fd: child for child in children}
        try:
            ready = readable(by_fd, seconds) if by_fd else []
        except InterruptedError:
            return []
        if len(ready) == len(by_fd) == 0:
            time.sleep(seconds)
        messages: list[dict[str, Any]] = []
        for fd in ready:
            found = by_fd[fd].read_messages()
            messages += found
        for message in messages:
            post = self.posts.get(str(message.get("from"))) if message.get("kind") == "error" else None
            if post is not None:
                post.told = str(message.get("error"))
        if ready and not messages:
            # Only closed pipes of workers that are ending: do not spin until they are reaped.
            time.sleep(min(seconds, 0.01))
        return messages

    def note_error(self, name: str, text: str) -> None:
        """Remembers the first exception of any worker: it is the one that explains the rest."""
        if self.first_error is None:
            self.first_error = (name, text)

    def watch(self) -> list[dict[str, Any]]:
        """Reaps, checks deadlines, restarts. Returns last messages of workers that ended.

        Raises:
            WorkerError: the learner, an executor or an actor was given up, or more than half of the samplers.
        """
        now = self._clock()
        if self._last_watch_s is not None and now - self._last_watch_s > _ASLEEP_S:
            self.on_event("warning", f"the machine slept for {now - self._last_watch_s:.0f} s; deadlines extended")
            for post in self.posts.values():
                post.heartbeat_seen_s = now
        self._last_watch_s = now
        messages: list[dict[str, Any]] = []
        weigh = now >= self._next_memory_s
        if weigh:
            self._next_memory_s = now + _MEMORY_S
        for post in self.posts.values():
            if post.child is not None:
                messages += self._check(post, now) or (self._weigh(post, now) if weigh else [])
            elif post.restarts.due(now):
                self._restart(post)
        self._judge()
        return messages

    def _check(self, post: Post, now: float) -> list[dict[str, Any]]:
        child = post.child
        assert child is not None
        code = child.poll()
        if code is not None:
            return self._ended(post, code, now)
        control = self._board.control(post.spec.row)
        heartbeat, phase = int(control[words.HEARTBEAT]), Phase(int(control[words.PHASE]))
        if heartbeat != post.last_heartbeat:
            post.last_heartbeat, post.heartbeat_seen_s = heartbeat, now
            return []
        silent_s = now - post.heartbeat_seen_s
        if silent_s <= (post.spec.step_deadline_s if phase is Phase.STEP else DEADLINE_S[phase]):
            return []
        child.signal_group(signal.SIGUSR1)
        time.sleep(_STACK_S)
        self._kill([post])
        why = f"silent for {silent_s:.0f} s in phase {phase.name}; its stack is in logs/{post.spec.name}.log"
        return self._ended(post, -int(signal.SIGKILL), now, why)

    def _weigh(self, post: Post, now: float) -> list[dict[str, Any]]:
        """Ends a worker whose environment eats the machine's memory, before the system chooses a victim."""
        child, limit = post.child, post.spec.memory_limit_bytes
        if child is None or limit is None:
            return []
        used = private_memory_bytes(child.pid)
        if used is None or used <= limit:
            return []
        self._kill([post])
        why = f"ended: it used {size(used)} of memory, its limit is {size(limit)} (does the environment leak?)"
        return self._ended(post, -int(signal.SIGKILL), now, why)

    def _ended(self, post: Post, code: int, now: float, why: str | None = None) -> list[dict[str, Any]]:
        child = post.child
        assert child is not None
        child.signal_group(signal.SIGKILL)
        messages = child.read_messages()
        child.close()
        post.child = None
        phase = Phase(int(self._board.control(post.spec.row)[words.PHASE]))
        if code == 0 and phase is Phase.DONE and post.spec.role in ("evaluator", "visualizer"):
            post.finished = True
            return messages
        reason = why or _exit_text(code, phase)
        told = next((str(m.get("error")) for m in reversed(messages) if m.get("kind") == "error"), post.told)
        post.failures.append(f"{reason}: {told}" if told else reason)
        self.note_error(post.spec.name, post.failures[-1])
        post.restarts.failed(now)
        level = "error" if post.restarts.given_up else "warning"
        self.on_event(level, f"{post.spec.name} {post.failures[-1]}{self._outlook(post, now)}")
        return messages

    def _outlook(self, post: Post, now: float) -> str:
        if post.restarts.given_up:
            return "; given up"
        wait_s = (post.restarts.due_s or now) - now
        return "; restarting now" if wait_s <= 0 else f"; restarting in {wait_s:.1f} s"

    def _restart(self, post: Post) -> None:
        self._takeover(post.spec)
        try:
            self._launch(post)
        except OSError as error:
            post.restarts.failed(self._clock())
            self.on_event("error", f"{post.spec.name} could not be started: {error}")
            return
        post.restarts.restarted()

    def _judge(self) -> None:
        for post in self._of("learner"):
            if post.restarts.given_up:
                raise WorkerError(f"the learner failed {len(post.failures)} times; the last: {post.failures[-1]}")
        for post in self._of("executor") + self._of("actor"):  # all wait for each of them: there is no going on without
            if post.restarts.given_up:
                raise WorkerError(f"{post.spec.name} failed {len(post.failures)} times; the last: {post.failures[-1]}")
        samplers = self._of("sampler")
        lost = [post for post in samplers if post.restarts.quarantined and post.child is None]
        if samplers and 2 * len(lost) > len(samplers):
            raise WorkerError(
                f"{len(lost)} of {len(samplers)} samplers keep failing; {lost[0].spec.name}: {lost[0].failures[-1]}"
            )

    def stop(
        self, hurry: Callable[[], bool], on_messages: Callable[[list[dict[str, Any]]], None],
        on_wait: Callable[[list[str]], None] = lambda names: None,
    ) -> None:
        """Ends everybody: stop flag, then SIGKILL for who is out of patience. Nobody is watched when it returns.

        Args:
            hurry: asked again and again whether all patience is over.
            on_messages: gets what is said meanwhile.
            on_wait: gets the names of those who are waited for, again and again.
        """
        self._board.header[words.STOP] = 1
        start = self._clock()
        while living := [post for post in self.posts.values() if post.child is not None]:
            on_messages(self.wait(0.02))
            on_wait([post.spec.name for post in living])
            in_hurry, late = hurry(), []
            for post in living:
                if post.child is not None and post.child.poll() is not None:
                    on_messages(self._buried(post))
                elif in_hurry or self._is_late(post, start):
                    late.append(post)
            self._kill(late)
            for post in late:
                on_messages(self._buried(post))
        end_strays(self._nest.nonce)

    def _is_late(self, post: Post, start: float) -> bool:
        """Whether a worker that is to end since ``start`` has had its time."""
        now = self._clock()
        if post.spec.role != "learner":
            return now - start > _STOP_S
        control = self._board.control(post.spec.row)
        heartbeat, phase = int(control[words.HEARTBEAT]), Phase(int(control[words.PHASE]))
        if heartbeat != post.last_heartbeat:
            post.last_heartbeat, post.heartbeat_seen_s = heartbeat, now
        silent_s = now - max(start, post.heartbeat_seen_s)
        return silent_s > (DEADLINE_S[phase] if phase in _LAST_WORK else _STOP_S)

    def _kill(self, posts: list[Post]) -> None:
        """SIGKILL to workers; all have one time to die, and who does not is named: the run goes on without it."""
        children = [post.child for post in posts if post.child is not None]
        for child in children:
            child.signal_group(signal.SIGKILL)
        end = self._clock() + DEATH_S
        for child in children:
            if child.kill_and_wait(max(0.0, end - self._clock())) is None:
                self.on_event("error", left_behind(child.spec.name, child.pid))
        if self._last_watch_s is not None:
            self._last_watch_s = self._clock()  # waiting for them was no sleep

    def _buried(self, post: Post) -> list[dict[str, Any]]:
        child = post.child
        assert child is not None
        child.signal_group(signal.SIGKILL)
        messages = child.read_messages()
        phase = Phase(int(self._board.control(post.spec.row)[words.PHASE]))
        code = child.poll()
        if code != 0 and post.spec.role == "learner" and phase is not Phase.DONE:
            how = "was left behind" if code is None else _exit_text(code, phase)
            self.on_event("warning", f"learner {how} while stopping; its last checkpoint counts")
        child.close()
        post.child = None
        return messages


def private_memory_bytes(pid: int) -> int | None:
    """Memory that a process shares with nobody; None when it is gone."""
    with contextlib.suppress(psutil.Error, OSError):
        memory = psutil.Process(pid).memory_info()
        return int(memory.rss - getattr(memory, "shared", 0))
    return None


def _exit_text(code: int, phase: Phase) -> str:
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"ended by {name} in phase {phase.name}"
    if code == 0:
        return f"ended by itself (exit code 0) in phase {phase.name} without being asked to"
    return f"ended with exit code {code} in phase {phase.name}"
