"""Two network namespaces of this machine joined by a link that delays and loses packets (Linux, as root).

The link is a process that carries packets from one TUN device to the other, since not every kernel has ``netem``:
``python tests/support/lossy_link.py NAME DELAY_S LOSS``. It runs until its standard input is closed; ``-`` there cuts
the link, ``+`` joins it again.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from spreeze.errors import ResourceError
from spreeze.machine.processes import end_with_parent

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_ADDRESSES = ("10.93.0.1", "10.93.0.2")
_MAX_PACKET_BYTES = 65536
_QUEUE_PACKETS = 20_000
"""Packets under way at most; more are dropped, as a router does."""


class Ends(NamedTuple):
    """Namespace and address of each end; the first is where the driver is."""

    spaces: tuple[str, str]
    addresses: tuple[str, str]
    orders: BinaryIO

    def cut(self, cut: bool = True) -> None:
        """Loses all packets from now on, or none but those of chance."""
        self.orders.write(b"-" if cut else b"+")
        self.orders.flush()

    def command(self, end: int) -> list[str]:
        """What begins a command that runs at that end."""
        return ["ip", "netns", "exec", self.spaces[end]]


@contextlib.contextmanager
def lossy_link(delay_s: float, loss: float) -> Iterator[Ends]:
    """A link with that delay each way, which loses that share of all packets.

    Raises:
        ResourceError: not as root, or the kernel has no namespaces or no TUN devices.
    """
    name = f"spz{os.getpid() % 100_000}"
    spaces = f"{name}a", f"{name}b"
    with contextlib.ExitStack() as stack:
        for space in spaces:
            _run("ip", "netns", "add", space)
            stack.callback(subprocess.run, ["ip", "netns", "del", space], check=False, capture_output=True)
        process = subprocess.Popen(
            [sys.executable, __file__, name, str(delay_s), str(loss)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        stack.callback(_end, process)
        assert process.stdout is not None
        assert process.stdin is not None
        if process.stdout.readline().strip() != b"up":
            raise ResourceError("no link between two network namespaces: /dev/net/tun cannot be used here")
        yield Ends(spaces, _ADDRESSES, process.stdin)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        told = getattr(error, "stderr", b"") or str(error).encode()
        raise ResourceError(
            f"{' '.join(command)}: {told.decode(errors='replace').strip()}; network namespaces need Linux and root"
        ) from None


def _device(name: str, space: str, address: str) -> int:
    """The descriptor of a TUN device that was moved into a namespace."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    _run("ip", "link", "set", name, "netns", space)
    for command in (
        ("addr", "add", f"{address}/30", "dev", name),
        ("link", "set", name, "up"),
        ("link", "set", "lo", "up"),
    ):
        _run("ip", "-n", space, *command)
    return fd


def carry(first: int, second: int, delay_s: float, loss: float, until: int) -> None:
    """Carries packets between two devices until ``until`` is at its end; orders come from there."""
    cut = False
    dice, number = random.Random(0), 0
    waiting: list[tuple[float, int, int, bytes]] = []
    other = {first: second, second: first}
    while True:
        left_s = None if not waiting else max(0.0, waiting[0][0] - time.monotonic())
        readable, _, _ = select.select([first, second, until], [], [], left_s)
        if until in readable:
            if not (orders := os.read(until, 64)):
                return
            cut = orders.endswith(b"-")
        now = time.monotonic()
        for fd in {*readable} - {until}:
            with contextlib.suppress(BlockingIOError):
                for _ in range(64):
                    packet = os.read(fd, _MAX_PACKET_BYTES)
                    if not cut and dice.random() >= loss and len(waiting) < _QUEUE_PACKETS:
                        number += 1
                        heapq.heappush(waiting, (now + delay_s, number, other[fd], packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, fd, packet = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # its queue is full, or the device is going down
                os.write(fd, packet)


def main(argv: list[str]) -> None:
    end_with_parent()
    name, delay_s, loss = argv[0], float(argv[1]), float(argv[2])
    try:
        ends = [f"{name}{end}" for end in "ab"]
        first, second = [_device(end, end, address) for end, address in zip(ends, _ADDRESSES, strict=True)]
    except (OSError, ResourceError):
        sys.stdout.write("down\n")
        return
    sys.stdout.write("up\n")
    sys.stdout.flush()
    carry(first, second, delay_s, loss, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
