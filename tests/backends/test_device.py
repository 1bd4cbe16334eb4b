"""The host's own numbers, read through real /proc files; a GPU is never needed."""

import multiprocessing
import os
import subprocess
from types import SimpleNamespace

from backends import device
from backends.device import DeviceReading, GpuProbe, HostProbe, memory_bytes, open_probe, processes_of

MIB = 2**20


def _hold(holds, done):
    block = bytearray(os.urandom(1)) * (64 * MIB)
    holds.set()
    done.wait(30)
    assert block


def test_what_a_child_takes_is_ours_and_given_back():
    context = multiprocessing.get_context("spawn")
    holds, done = context.Event(), context.Event()
    child = context.Process(target=_hold, args=(holds, done))
    child.start()
    assert holds.wait(30)
    probe = open_probe()
    try:
        assert child.pid in processes_of(os.getpid())
        before = probe.read()
        assert before.ours > 64 * MIB
        assert before.free <= before.total == memory_bytes()
        assert before.free + before.ours + before.others >= before.total
        done.set()
        child.join(30)
        assert [probe.read().ours for _ in range(10)][-1] <= before.ours - 60 * MIB
    finally:
        probe.close()


def test_a_process_that_began_later_is_found():
    probe = HostProbe()
    try:
        probe.read()
        context = multiprocessing.get_context("spawn")
        holds, done = context.Event(), context.Event()
        child = context.Process(target=_hold, args=(holds, done))
        child.start()
        assert holds.wait(30)
        readings = [probe.read().ours for _ in range(101)]
        done.set()
        child.join(30)
        assert readings[-1] - readings[0] > 60 * MIB
    finally:
        probe.close()


class Nvml:
    """What NVIDIA's library says of one device, as far as it is asked."""

    is_shut = False
    free = 300 * MIB

    def __init__(self, running):
        self.running = running

    def nvmlDeviceGetMemoryInfo(self, handle):
        assert handle == "first"
        return SimpleNamespace(total=1000 * MIB, free=self.free)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        assert handle == "first"
        return self.running

    def nvmlShutdown(self):
        self.is_shut = True


def test_of_a_gpu_what_our_processes_hold_is_ours_and_the_rest_of_what_is_used_is_others():
    def using(pid, mib):
        return SimpleNamespace(pid=pid, usedGpuMemory=None if mib is None else mib * MIB)

    with subprocess.Popen(["sleep", "60"]) as child:
        # Of some processes the driver does not know what they hold.
        nvml = Nvml([using(os.getpid(), 200), using(child.pid, 150), using(1, 90), using(child.pid, None)])
        probe = GpuProbe(nvml, "first")
        assert probe.read() == DeviceReading(1000 * MIB, 300 * MIB, 350 * MIB, 350 * MIB)
        child.kill()
        child.wait()
        # Its number may be another's now, who is not ours.
        assert {probe.read().ours for _ in range(99)} == {350 * MIB}
        assert probe.read() == DeviceReading(1000 * MIB, 300 * MIB, 200 * MIB, 500 * MIB)
    probe.close()
    assert nvml.is_shut


def test_who_holds_what_is_asked_when_the_free_bytes_have_moved_and_now_and_then():
    nvml = Nvml([SimpleNamespace(pid=os.getpid(), usedGpuMemory=200 * MIB)])
    probe = GpuProbe(nvml, "first")
    assert probe.read().ours == 200 * MIB
    nvml.running[0].usedGpuMemory = 201 * MIB
    nvml.free = 299 * MIB
    assert [probe.read().ours for _ in range(10)] == [200 * MIB] * 9 + [201 * MIB]
    nvml.running[0].usedGpuMemory = 203 * MIB
    nvml.free = 297 * MIB
    assert probe.read() == DeviceReading(1000 * MIB, 297 * MIB, 203 * MIB, 500 * MIB)
    probe.close()


def test_in_a_control_group_the_rest_of_its_limit_is_free(monkeypatch, tmp_path):
    monkeypatch.setattr(device, "_GROUP", tmp_path)
    (tmp_path / "memory.max").write_text(f"{1000 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{700 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {600 * MIB}\ninactive_file {100 * MIB}\n")
    probe = HostProbe()
    try:
        found = probe.read()
        assert (found.total, found.free) == (1000 * MIB, 400 * MIB)
        (tmp_path / "memory.current").write_text(f"{1050 * MIB}\n")
        assert probe.read().free == 50 * MIB
    finally:
        probe.close()


def test_an_empty_list_of_gpus_means_the_host(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert isinstance(open_probe(), HostProbe)
