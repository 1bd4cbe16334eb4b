"""An Ethernet switch in user space, whose cables lose and delay frames, for nodes in network namespaces.

`python -m benchmark_control_plane.experiments.fleet.network_switch NAME ...` makes a TAP interface for each
name, which lasts as long as the process, and writes a line when all are there. A line `[PORT, DELAY, LOSS]`
on its input sets a cable; it ends with its input. It needs no queueing discipline `netem` in the kernel.
"""

import fcntl
import json
import os
import random
import select
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

_TUNSETIFF = 0x400454CA
_TAP, _NO_PACKET_INFO = 0x0002, 0x1000
_FRAME_BYTES = 65_536


@dataclass(slots=True)
class Cable:
    """The cable of a port.

    Attributes:
        delay: seconds that a frame takes longer, in each direction.
        loss: share of the frames that are lost, in each direction.
    """

    delay: float = 0.0
    loss: float = 0.0


class Switch:
    """Carries frames between ports, each to the port from which its target was heard."""

    def __init__(self, ports: Sequence[int], seed: int = 0) -> None:
        """`ports` are file descriptors that take and give one frame at a time; `seed` that of the losses."""
        self.cables = [Cable() for _ in ports]
        self._ports = ports
        self._number = {descriptor: port for port, descriptor in enumerate(ports)}
        self._known: dict[bytes, int] = {}
        self._draws = random.Random(seed)
        self._pending: list[tuple[float, int, int, bytes]] = []
        self._count = 0

    def run(self, control: int, obey: Callable[[bytes], bool]) -> None:
        """Carries frames; ends when `obey`, which is given what arrives at `control`, returns False."""
        poll = select.epoll()
        for descriptor in (control, *self._ports):
            poll.register(descriptor, select.EPOLLIN)
        while True:
            for descriptor, _ in poll.poll(self._seconds_to_next()):
                content = os.read(descriptor, _FRAME_BYTES)
                if descriptor != control:
                    self._take(self._number[descriptor], content, time.monotonic())
                elif not obey(content):
                    return
            self._deliver(time.monotonic())

    def _seconds_to_next(self) -> float:
        """How long nothing is due; negative without a frame."""
        return max(0.0, self._pending[0][0] - time.monotonic()) if self._pending else -1.0

    def _take(self, port: int, frame: bytes, now: float) -> None:
        self._known[frame[6:12]] = port
        target = self._known.get(frame[:6])
        for other in range(len(self._ports)) if target is None else (target,):
            kept = (1.0 - self.cables[port].loss) * (1.0 - self.cables[other].loss)
            if other == port or self._draws.random() >= kept:
                continue
            self._count += 1
            due = now + self.cables[port].delay + self.cables[other].delay
            heappush(self._pending, (due, self._count, other, frame))

    def _deliver(self, now: float) -> None:
        while self._pending and self._pending[0][0] <= now:
            _, _, port, frame = heappop(self._pending)
            try:
                os.write(self._ports[port], frame)
            except OSError as error:
                # An interface that is down, or full: the frame is lost, as in any switch.
                sys.stderr.write(f"port {port}: {error}\n")


def tap(name: str) -> int:
    """A new TAP interface of this name; returns its file descriptor. Raises OSError."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP | _NO_PACKET_INFO))
    return descriptor


def main() -> None:
    """Runs a switch with the interfaces that the arguments name."""
    switch = Switch([tap(name) for name in sys.argv[1:]])

    def obey(lines: bytes) -> bool:
        for line in lines.splitlines():
            port, delay, loss = json.loads(line)
            switch.cables[port] = Cable(delay, loss)
        return bool(lines)

    sys.stdout.write("ready\n")
    sys.stdout.flush()
    switch.run(sys.stdin.fileno(), obey)


if __name__ == "__main__":
    main()
