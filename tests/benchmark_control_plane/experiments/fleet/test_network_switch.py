"""The switch between nodes in namespaces, with sockets in place of interfaces."""

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from benchmark_control_plane.experiments.fleet.network_switch import Cable, Switch

ALL = b"\xff" * 6


def frame(target: bytes, source: bytes, content: bytes = b"") -> bytes:
    return target + source + b"\x08\x00" + content


def address(number: int) -> bytes:
    return bytes([2, 0, 0, 0, 0, number])


class Wired:
    """A switch of three ports that runs in a thread, and the other ends of its cables."""

    def __init__(self) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)]
        self.ends = [end for end, _ in pairs]
        self._inner = [inner for _, inner in pairs]
        for end in self.ends:
            end.settimeout(5)
        self.switch = Switch([inner.fileno() for inner in self._inner])
        control, self._control = os.pipe()
        self._thread = threading.Thread(target=self.switch.run, args=(control, bool), daemon=True)
        self._thread.start()
        self._read = control

    def close(self) -> None:
        os.close(self._control)
        self._thread.join(5)
        os.close(self._read)
        for end in [*self.ends, *self._inner]:
            end.close()
        assert not self._thread.is_alive()

    def waiting(self, port: int, sender: int = 0) -> list[bytes]:
        """What has arrived at a port; a frame to all is sent after it, through the same switch."""
        mark = frame(ALL, address(sender), b"mark")
        self.ends[sender].send(mark)
        found = []
        while (content := self.ends[port].recv(100)) != mark:
            found.append(content)
        return found


@pytest.fixture
def wired() -> Iterator[Wired]:
    made = Wired()
    yield made
    made.close()


def test_a_frame_goes_to_all_until_its_target_was_heard(wired: Wired) -> None:
    first = frame(address(1), address(0))
    wired.ends[0].send(first)
    assert wired.ends[1].recv(100) == wired.ends[2].recv(100) == first
    answer = frame(address(0), address(1))
    wired.ends[1].send(answer)
    assert wired.ends[0].recv(100) == answer
    assert wired.waiting(2) == []


def test_a_cable_that_is_cut_carries_nothing_in_either_direction(wired: Wired) -> None:
    wired.switch.cables[2] = Cable(loss=1.0)
    wired.ends[2].send(frame(ALL, address(2)))
    wired.ends[0].send(frame(ALL, address(0), b"to all"))
    assert wired.waiting(1) == [frame(ALL, address(0), b"to all")]
    wired.switch.cables[2] = Cable()
    assert wired.waiting(2) == []


def test_a_part_of_the_frames_is_lost(wired: Wired) -> None:
    wired.switch.cables[1] = Cable(loss=0.5)
    for number in range(100):
        wired.ends[0].send(frame(ALL, address(0), bytes([number])))
        # The third port gets each, so that the switch has handled it.
        assert wired.ends[2].recv(100)[-1] == number
    wired.switch.cables[1] = Cable()
    kept = len(wired.waiting(1))
    assert 25 < kept < 75


def test_a_slow_cable_delays_frames_and_keeps_their_order(wired: Wired) -> None:
    wired.switch.cables[1] = Cable(delay=0.3)
    sent = [frame(ALL, address(0), bytes([number])) for number in range(5)]
    for each in sent:
        wired.ends[0].send(each)
    # The fast port has all of them before the slow one has the first.
    assert [wired.ends[2].recv(100) for _ in sent] == sent
    wired.ends[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        wired.ends[1].recv(100)
    wired.ends[1].settimeout(5)
    assert [wired.ends[1].recv(100) for _ in sent] == sent
