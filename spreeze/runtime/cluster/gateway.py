"""The Ray actor on every other host: answers pulls with chunks, takes weights, reports its clock.

Its methods take and return bytes, and raise nothing: the answer reports a failure, so that Ray has no exception to
pickle. Ray runs ``pull`` and ``listen``, which wait, in one thread and the others in another one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from spreeze.errors import SpreezeError, TransportError
from spreeze.formatting import clean
from spreeze.runtime.cluster.host import HostRun, HostRunJob, HostSamplers, host_checks
from spreeze.transport.chunks import Taken, sign_chunk, sign_json, verify, verify_json
from spreeze.transport.gossip import seal_messages, unseal_messages
from spreeze.workers.jobs import HostJob

PULL, CONTROL = "pull", "control"  # groups of methods, each with a thread of its own
GROUPS = {PULL: 1, CONTROL: 1}
LINGER_S = 0.1
"""Default time that a pull waits for a chunk to reach its least size; also the longest wait for a first row."""
_MAX_LINGER_S = 1.0
_POLL_S = 0.004
_END_S = 3.0


class GatewayActor:
    """Has the samplers of its host. Ray makes it again, on the same host, if its process dies."""

    def __init__(self, secret: bytes, job: bytes) -> None:
        """Starts the samplers of a sealed ``HostJob``, or the run of a ``HostRunJob``; neither for a survey."""
        self._secret = secret
        self._failure: str | None = None
        self._samplers: HostSamplers | None = None
        self._run: HostRun | None = None
        try:
            facts = verify_json(secret, b"job", job)
            if "arguments" in facts:
                self._run = HostRun(HostRunJob.from_json(facts))
                self._run.start()
            elif facts:
                self._start(HostJob.from_json(facts))
        except (SpreezeError, OSError, TypeError, KeyError) as error:
            self._failure = clean(f"{type(error).__name__}: {error}", 500)

    def _start(self, job: HostJob) -> None:
        # The time tells this start from earlier ones with the same job.
        self._samplers = HostSamplers(job, (job.seed << 40) + time.time_ns() // 1000 % (1 << 40))
        self._samplers.start()

    def pull(self, request: bytes) -> bytes:
        """The next chunk, once it is large enough or has waited; the request says how far samplers may continue."""
        try:
            return self._chunk(verify_json(self._secret, b"pull", request))
        except (SpreezeError, KeyError, TypeError, ValueError, AttributeError) as error:
            return self._no_rows({"failure": clean(f"{type(error).__name__}: {error}", 300)})

    def _chunk(self, request: dict[str, Any]) -> bytes:
        if self._samplers is not None and self._samplers.orphaned and not self._samplers.is_alive():
            self._start(self._samplers.job)
        samplers = self._samplers
        if samplers is None:
            return self._no_rows({"failure": self._failure})
        samplers.requested_s = time.monotonic()
        outlet = samplers.outlet
        if outlet is None:
            return self._no_rows(samplers.facts())
        if request.get("epoch") == outlet.epoch:
            outlet.allow(int(request["allowed"]))
        end = time.monotonic() + min(_MAX_LINGER_S, max(0.0, float(request.get("linger_s", LINGER_S))))
        while not outlet.fills_a_chunk and time.monotonic() < end:
            if outlet.waiting and outlet.quota_used:
                break
            time.sleep(_POLL_S)
        first, taken = outlet.taken, outlet.take()
        return sign_chunk(self._secret, outlet.epoch, first, taken, samplers.facts())

    def _no_rows(self, facts: dict[str, Any]) -> bytes:
        """A chunk of no rows, after a pause: the driver asks again at once."""
        time.sleep(LINGER_S)
        return sign_chunk(self._secret, 0, 0, Taken([], []), facts)

    def weights(self, data: bytes) -> bytes:
        """Takes one version of the weights, sealed; answers which one the samplers have now, and the time."""

        def taken() -> dict[str, Any]:
            samplers, sent = self._samplers, bytes(verify(self._secret, b"weights", data))
            order = (-1, -1) if samplers is None else samplers.take_weights(sent)
            return {"weights": list(order), "time_s": time.time()}

        return self._answer(taken)

    def listen(self, request: bytes) -> bytes:
        """The newest message of this host's learner, sealed for that start of its run, or none after a while."""
        try:
            fields = verify_json(self._secret, b"listen", request)
            start, (epoch, number) = str(fields["start"]), fields["after"]
            run = None if self._run is None or self._run.start_name != start else self._run
            message, end = None, time.monotonic() + LINGER_S
            while run is None or (message := run.memory.newest(run.number, (int(epoch), int(number)))) is None:
                if time.monotonic() >= end:
                    break
                time.sleep(_POLL_S)
            return seal_messages(self._secret, b"listen " + start.encode(), [] if message is None else [message])
        except (SpreezeError, KeyError, TypeError, ValueError):
            return b""

    def give(self, data: bytes) -> bytes:
        """Takes messages of other hosts' learners; they are sealed for this start of the host's run."""

        def taken() -> dict[str, Any]:
            run = self._run
            if run is None:
                raise TransportError(str(self._failure))
            for message in unseal_messages(self._secret, b"give " + run.start_name.encode(), data):
                run.memory.put(message)
            return {}

        return self._answer(taken)

    def ping(self, request: bytes) -> bytes:
        """This host's clock when the request came and when the answer goes, and how its own run is."""
        came_s = time.time()

        def status() -> dict[str, Any]:
            fields = verify_json(self._secret, b"ping", request)
            of_run = {"failure": self._failure} if self._run is None else self._run.facts(fields.get("living", ()))
            return {**of_run, "came_s": came_s, "went_s": time.time()}

        return self._answer(status)

    def bandwidth(self, request: bytes) -> bytes:
        """Returns as many zeros as requested, to time the transfer."""
        try:
            return bytes(min(1 << 26, int(verify_json(self._secret, b"bandwidth", request)["bytes"])))
        except (SpreezeError, KeyError, TypeError, ValueError):
            return b""

    def check(self, request: bytes) -> bytes:
        """Checks of this host for a task (``host.host_checks``), as JSON."""
        return self._answer(lambda: host_checks(verify_json(self._secret, b"check", request)))

    def end(self, request: bytes) -> bytes:
        """Ends the samplers, or the run; the actor stays until Ray ends it."""

        def ended() -> dict[str, Any]:
            verify_json(self._secret, b"end", request)
            for started in (self._samplers, self._run):
                if started is not None:
                    started.end(_END_S)
            return {"ended": True}

        return self._answer(ended)

    def _answer(self, act: Callable[[], dict[str, Any]]) -> bytes:
        try:
            facts = act()
        except (SpreezeError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            facts = {"failure": clean(f"{type(error).__name__}: {error}", 300)}
        return sign_json(self._secret, b"answer", facts)
