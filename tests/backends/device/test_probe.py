"""Probes of the host through real /proc files, and of a GPU through a fake NVML."""

import multiprocessing
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from backends.device import probe as device_probe
from backends.device.probe import (
    UNCOUNTED_NAME,
    GpuProbe,
    HostProbe,
    free_gpu_bytes,
    memory_bytes,
    open_probe,
    processes_of,
)
from benchmark_control_plane.common.command_line import BadInput
from benchmark_control_plane.judge.results import environment
from controlplane.core.device import DeviceReading

MIB = 2**20


def _hold(holds, done):
    block = bytearray(os.urandom(1)) * (64 * MIB)
    holds.set()
    done.wait(30)
    assert block


@pytest.mark.long
def test_memory_of_a_child_process_counts_as_ours_until_it_exits():
    context = multiprocessing.get_context("spawn")
    holds, done = context.Event(), context.Event()
    child = context.Process(target=_hold, args=(holds, done))
    child.start()
    assert holds.wait(30)
    probe = open_probe()
    try:
        assert child.pid in processes_of(os.getpid())
        before = probe.read()
        assert before.own_bytes > 64 * MIB
        assert before.free <= before.total == memory_bytes()
        assert before.free + before.own_bytes + before.other_bytes >= before.total
        done.set()
        child.join(30)
        assert [probe.read().own_bytes for _ in range(10)][-1] <= before.own_bytes - 60 * MIB
    finally:
        probe.close()


@pytest.mark.long
def test_a_process_started_later_is_found():
    probe = HostProbe()
    try:
        probe.read()
        context = multiprocessing.get_context("spawn")
        holds, done = context.Event(), context.Event()
        child = context.Process(target=_hold, args=(holds, done))
        child.start()
        assert holds.wait(30)
        readings = [probe.read().own_bytes for _ in range(101)]
        done.set()
        child.join(30)
        assert readings[-1] - readings[0] > 60 * MIB
    finally:
        probe.close()


@pytest.mark.long
def test_a_process_that_takes_the_uncounted_name_late_is_left_out():
    """A new process has another name until it has imported what it runs."""
    code = (
        f"block = bytearray(b'x') * (64 * {MIB}); print(flush=True); input()\n"
        f"open('/proc/self/comm', 'w').write('{UNCOUNTED_NAME}'); print(flush=True); input()"
    )
    probe = HostProbe()
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        child.stdout.readline()
        named_otherwise = probe.read().own_bytes
        child.stdin.write("\n")
        child.stdin.flush()
        child.stdout.readline()
        readings = [probe.read().own_bytes for _ in range(101)]
        child.stdin.write("\n")
    probe.close()
    assert named_otherwise - readings[-1] > 60 * MIB


class Refused(Exception):
    """Error of the fake NVML."""


class NotSupported(Refused):
    pass


class Nvml:
    """Fake of the NVML functions that the probe calls, for one device."""

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


def test_gpu_memory_is_split_between_our_processes_and_others():
    def using(pid, mib):
        return SimpleNamespace(pid=pid, usedGpuMemory=None if mib is None else mib * MIB)

    with subprocess.Popen(["sleep", "60"]) as child:
        # The driver reports no bytes for some processes.
        nvml = Nvml([using(os.getpid(), 200), using(child.pid, 150), using(1, 90), using(child.pid, None)])
        probe = GpuProbe(nvml, "first")
        assert probe.read() == DeviceReading(1000 * MIB, 300 * MIB, 350 * MIB, 350 * MIB)
        child.kill()
        child.wait()
        # The process id may be reused by an unrelated process.
        assert {probe.read().own_bytes for _ in range(99)} == {350 * MIB}
        assert probe.read() == DeviceReading(1000 * MIB, 300 * MIB, 200 * MIB, 500 * MIB)
    probe.close()
    assert nvml.is_shut


def test_memory_per_process_is_queried_when_free_bytes_change_and_periodically():
    nvml = Nvml([SimpleNamespace(pid=os.getpid(), usedGpuMemory=200 * MIB)])
    probe = GpuProbe(nvml, "first")
    assert probe.read().own_bytes == 200 * MIB
    nvml.running[0].usedGpuMemory = 201 * MIB
    nvml.free = 299 * MIB
    assert [probe.read().own_bytes for _ in range(10)] == [200 * MIB] * 9 + [201 * MIB]
    nvml.running[0].usedGpuMemory = 203 * MIB
    nvml.free = 297 * MIB
    assert probe.read() == DeviceReading(1000 * MIB, 297 * MIB, 203 * MIB, 500 * MIB)
    probe.close()


def test_free_memory_respects_the_control_group_limit(monkeypatch, tmp_path):
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


def test_an_empty_cuda_visible_devices_selects_the_host(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert isinstance(open_probe(), HostProbe)


def test_total_gpu_memory_excludes_the_driver_reserve(nvml):
    assert memory_bytes() == 1000 * MIB and nvml.is_shut
    probe = open_probe()
    assert probe.read() == DeviceReading(1000 * MIB, 300 * MIB, 0, 700 * MIB)
    probe.close()


def test_free_gpu_bytes(nvml, monkeypatch):
    assert free_gpu_bytes() == 300 * MIB and nvml.is_shut
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert free_gpu_bytes() is None


def test_a_gpu_that_shares_host_memory_selects_the_host(nvml):
    """NVML reports no memory for such a device."""
    nvml.total = None
    assert memory_bytes() == device_probe._host_bytes() and nvml.is_shut
    probe = open_probe()
    assert isinstance(probe, HostProbe)
    probe.close()


def test_without_memory_per_process_all_used_memory_counts_as_others(nvml):
    nvml.running = None
    probe = open_probe()
    assert probe.read() == DeviceReading(1000 * MIB, 300 * MIB, 0, 700 * MIB)
    probe.close()


def test_the_first_mig_device_is_used(nvml):
    """CUDA uses the first MIG device unless CUDA_VISIBLE_DEVICES names one."""
    nvml.instance = "a seventh"
    assert memory_bytes() == 1000 * MIB


@pytest.mark.parametrize("visible", [" 0, 1", "GPU-1,GPU-2"])
def test_the_first_visible_gpu_is_used(nvml, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert memory_bytes() == 1000 * MIB


@pytest.mark.parametrize("visible", ["-1", "NoDevFiles"])
def test_an_invalid_first_entry_hides_all_gpus(nvml, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert memory_bytes() == device_probe._host_bytes()


@pytest.mark.parametrize("visible", ["1", "GPU-9"])
def test_a_missing_gpu_is_reported(nvml, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ValueError, match=f"CUDA_VISIBLE_DEVICES={visible}: .*no device|not found"):
        memory_bytes()
    assert nvml.is_shut


@pytest.mark.parametrize("stated", [None, "FASTEST_FIRST"])
def test_cuda_numbers_gpus_as_nvml_does_unless_the_operator_states_an_order(stated):
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_ORDER"}
    environment |= {} if stated is None else {"CUDA_DEVICE_ORDER": stated}
    program = "import os, backends.device.probe; print(os.environ['CUDA_DEVICE_ORDER'])"
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    assert ran.stdout.strip() == (stated or "PCI_BUS_ID")


def test_results_record_the_gpu(nvml, monkeypatch):
    assert environment()["gpu"] == "NVIDIA H100 80GB HBM3, driver 570.124.06" and nvml.is_shut
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(BadInput, match="CUDA_VISIBLE_DEVICES=7"):
        environment()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert "gpu" not in environment()
