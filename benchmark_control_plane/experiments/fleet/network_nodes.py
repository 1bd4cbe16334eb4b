"""Several machines on one: network namespaces with an address each, on a switch whose cables can be bad.

It needs the capabilities CAP_NET_ADMIN and CAP_SYS_ADMIN, `/dev/net/tun`, and the programs `ip` and
`nsenter`. Memory, cores, files and processes are those of the one machine.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_NET_ADMIN, _SYS_ADMIN = 1 << 12, 1 << 21
_SUBNET = "10.231.0"
# A namespace outlives its processes by a moment.
_END_SECONDS = 10.0


def can_make_networks() -> bool:
    """Whether this process may make namespaces and interfaces here."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    capabilities = int(status.partition("CapEff:")[2].split()[0], 16)
    has_programs = all(shutil.which(program) for program in ("ip", "nsenter"))
    is_allowed = capabilities & _NET_ADMIN and capabilities & _SYS_ADMIN
    return bool(is_allowed and has_programs and Path("/dev/net/tun").exists())


@dataclass(frozen=True, slots=True)
class NetworkNode:
    """One namespace: its name, its address, and the port of the switch that its cable is in."""

    name: str
    address: str
    port: int

    def command(self, *words: str) -> list[str]:
        """A command line that runs these words there."""
        return ["nsenter", f"--net=/run/netns/{self.name}", "--", *words]

    def has(self, process: int) -> bool:
        """Whether a process runs there; False if it has ended."""
        with suppress(FileNotFoundError):
            own = Path(f"/proc/{process}/ns/net").stat().st_ino
            return own == Path(f"/run/netns/{self.name}").stat().st_ino
        return False

    def processes(self) -> list[int]:
        """All processes there."""
        return [int(word) for word in _ip("netns", "pids", self.name).split()]

    def kill(self) -> None:
        """Ends all processes there, and waits for their end. Raises TimeoutError."""
        end = time.monotonic() + _END_SECONDS
        while running := self.processes():
            for process in running:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            if time.monotonic() > end:
                raise TimeoutError(f"processes {running} of {self.name} did not end")
            time.sleep(0.05)


class Network:
    """Nodes on one switch; this process reaches them, too."""

    def __init__(self, nodes: Sequence[NetworkNode], switch: subprocess.Popen[bytes]) -> None:
        self.nodes = nodes
        self._switch = switch

    def set_cable(self, node: NetworkNode, *, delay: float = 0.0, loss: float = 0.0) -> None:
        """Delays frames from and to a node by `delay` seconds and loses a share of them; 1 cuts it off."""
        assert self._switch.stdin is not None
        self._switch.stdin.write(json.dumps([node.port, delay, loss]).encode() + b"\n")
        self._switch.stdin.flush()


@contextmanager
def network(count: int) -> Iterator[Network]:
    """Makes `count` nodes; at the end all processes on them are killed. Raises RuntimeError."""
    nodes = [NetworkNode(f"tandem{at}", f"{_SUBNET}.{at}", at) for at in range(1, count + 1)]
    names = ["tandem0", *(node.name for node in nodes)]
    with ExitStack() as stack:
        for node in nodes:
            _ip("netns", "add", node.name)
            stack.callback(_ip, "netns", "del", node.name)
        switch = stack.enter_context(_switch(names))
        for node in nodes:
            stack.callback(node.kill)
            _ip("link", "set", node.name, "netns", node.name)
            inside = ("-n", node.name)
            _ip(*inside, "address", "add", f"{node.address}/24", "dev", node.name)
            _ip(*inside, "link", "set", "lo", "up")
            _ip(*inside, "link", "set", node.name, "up")
        _ip("address", "add", f"{_SUBNET}.254/24", "dev", names[0])
        _ip("link", "set", names[0], "up")
        yield Network(nodes, switch)


@contextmanager
def _switch(names: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "benchmark_control_plane.experiments.fleet.network_switch", *names]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError("the switch did not start; its error is above")
        yield process


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
