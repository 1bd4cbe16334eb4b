"""The host's own numbers, read through real /proc files; a GPU is never needed."""

import multiprocessing
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from backends.device import probe as device_probe
from backends.device.probe import GpuProbe, HostProbe, free_gpu_bytes, memory_bytes, open_probe, processes_of
from benchmark_control_plane.common.arguments import BadInput
from benchmark_control_plane.judge.results import environment
from controlplane.core.device import DeviceReading

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


class Refused(Exception):
    """As NVIDIA's library says no."""


class NotSupported(Refused):
    pass


class Nvml:
    """What NVIDIA's library says of one device, as far as it is asked."""

    NVMLError = Refused
    NVMLError_NotSupported = NotSupported
    NVML_DEVICE_MIG_ENABLE = 1
    nvmlMemory_v2 = "with what the driver reserves"
    is_shut = False
    total = 1000 * MIB
    free = 300 * MIB
    device = "first"
    instance = None

    def __init__(self, running=()):
        self.running = running

    def nvmlInit(self):
        self.is_shut = False

    def nvmlDeviceGetHandleByIndex(self, index):
        if index:
            raise Refused(f"no device {index}")
        return self.device

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != "GPU-1":
            raise Refused("not found")
        return self.device

    def nvmlDeviceGetMigMode(self, handle):
        if self.instance is None:
            raise NotSupported
        return [1, 1]

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, index):
        assert (handle, index) == (self.device, 0)
        return self.instance

    def nvmlDeviceGetMemoryInfo(self, handle, version=None):
        assert handle == (self.instance or self.device)
        if self.total is None:
            raise NotSupported
        reserved = {"reserved": 40 * MIB} if version == self.nvmlMemory_v2 else {}
        total = self.total + 40 * MIB
        return SimpleNamespace(total=total, free=self.free, used=total - self.free, **reserved)

    def nvmlDeviceGetName(self, handle):
        assert handle == (self.instance or self.device)
        return "NVIDIA H100 80GB HBM3"

    def nvmlSystemGetDriverVersion(self):
        return "570.124.06"

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        assert handle == (self.instance or self.device)
        if self.running is None:
            raise NotSupported
        return self.running

    def nvmlShutdown(self):
        self.is_shut = True


@pytest.fixture
def nvml(monkeypatch):
    found = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", found)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return found


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
    monkeypatch.setattr(device_probe, "_CGROUP", tmp_path)
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


def test_the_devices_memory_is_what_the_driver_leaves(nvml):
    assert memory_bytes() == 1000 * MIB and nvml.is_shut
    probe = open_probe()
    assert probe.read() == DeviceReading(1000 * MIB, 300 * MIB, 0, 700 * MIB)
    probe.close()


def test_what_is_free_of_a_gpu_is_known_before_anything_is_loaded(nvml, monkeypatch):
    assert free_gpu_bytes() == 300 * MIB and nvml.is_shut
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert free_gpu_bytes() is None


def test_where_processor_and_gpu_share_one_memory_it_is_the_hosts(nvml):
    """NVML knows no bytes of such a device."""
    nvml.total = None
    assert memory_bytes() == device_probe._host_bytes() and nvml.is_shut
    probe = open_probe()
    assert isinstance(probe, HostProbe)
    probe.close()


def test_where_nobody_says_who_holds_what_nothing_is_ours(nvml):
    nvml.running = None
    probe = open_probe()
    assert probe.read() == DeviceReading(1000 * MIB, 300 * MIB, 0, 700 * MIB)
    probe.close()


def test_of_a_gpu_in_parts_the_first_part_counts(nvml):
    """CUDA sees no more of it, unless it is told which."""
    nvml.instance = "a seventh"
    assert memory_bytes() == 1000 * MIB


@pytest.mark.parametrize("visible", [" 0, 1", "GPU-1,GPU-2"])
def test_the_first_visible_gpu_is_asked(nvml, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert memory_bytes() == 1000 * MIB


@pytest.mark.parametrize("visible", ["-1", "NoDevFiles"])
def test_cuda_sees_nothing_behind_what_is_no_device(nvml, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert memory_bytes() == device_probe._host_bytes()


@pytest.mark.parametrize("visible", ["1", "GPU-9"])
def test_a_gpu_that_is_not_there_is_told_of(nvml, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ValueError, match=f"CUDA_VISIBLE_DEVICES={visible}: .*no device|not found"):
        memory_bytes()
    assert nvml.is_shut


def test_results_name_the_gpu_that_gave_them(nvml, monkeypatch):
    assert environment()["gpu"] == "NVIDIA H100 80GB HBM3, driver 570.124.06" and nvml.is_shut
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(BadInput, match="CUDA_VISIBLE_DEVICES=7"):
        environment()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert "gpu" not in environment()
