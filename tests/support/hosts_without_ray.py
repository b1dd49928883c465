"""Other hosts without Ray: their gateways are objects of this process, and each call is answered at once."""

import dataclasses
import os
from types import SimpleNamespace

from harness import PATIENCE_S

from spreeze.runtime.cluster.host import GatewayActor
from spreeze.runtime.cluster.ray_nodes import Node


class HostsWithoutRay:
    """The nodes of a cluster; ``actors`` are their gateways."""

    def __init__(self, *addresses):
        self.address, self.version, self.is_authenticated = "here", "none", True
        self.living = [Node(address, address, f"host-at-{address}") for address in addresses]
        self.actors = []

    def others(self):
        return self.living

    def place(self, node, secret, job):
        self.actors.append(GatewayActor(secret, job))
        gateway = SimpleNamespace(actor=self.actors[-1])
        gateway.call = lambda method, request: (method, getattr(gateway.actor, method)(request))
        return gateway

    def drop(self, gateway):
        if gateway.actor._run is not None:
            gateway.actor._run.end(PATIENCE_S)

    def ready(self, references, timeout_s):
        return list(references)

    def answer(self, reference):
        return reference[1]


def inherited(handle):
    """A handle as another process has it: with descriptors of its own."""
    messages = tuple(type(one)(fds=tuple(map(os.dup, one.fds))) for one in handle.messages)
    presence = type(handle.presence)(fds=tuple(map(os.dup, handle.presence.fds)))
    return dataclasses.replace(handle, presence=presence, messages=messages)


class Told:
    """What of a worker's context the bridge needs."""

    stopping = False

    def __init__(self):
        self.events = []

    def heartbeat(self, phase):
        pass

    def event(self, level, text):
        self.events.append(text)
