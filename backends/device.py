"""How much memory does the device have? NVML where there is a GPU, physical memory otherwise."""

import os


def memory_bytes() -> int:
    """Of the first GPU that this process may see; without any, of the host."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        return _host_bytes()
    try:
        import pynvml
    except ImportError:
        return _host_bytes()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return _host_bytes()
    try:
        first = (visible or "0").split(",")[0]
        handle = (
            pynvml.nvmlDeviceGetHandleByIndex(int(first))
            if first.isdigit()
            else pynvml.nvmlDeviceGetHandleByUUID(first)
        )
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    finally:
        pynvml.nvmlShutdown()


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
