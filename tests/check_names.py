"""Fails if two public classes of the product share a name, or a file name says nothing. Run by `make lint`.

One word has one meaning: a reader who searches for a class finds one definition. File names repeat only where
the folder tells the files apart.
"""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("controlplane", "predictors", "backends", "kernels", "benchmark_control_plane")
MEANINGLESS = (
    "manager",
    "helper",
    "helpers",
    "utils",
    "util",
    "handler",
    "process_data",
    "data",
    "common",
    "misc",
)
# The folder says which: each of two backends has a client and a worker, each layer its errors, each program
# a cli.
REPEATED_FILES = frozenset(
    {"attention.py", "calibration.py", "cli.py", "client.py", "errors.py", "sampling.py", "worker.py"}
)
REPEATED_CLASSES: frozenset[str] = frozenset()


def sources() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", *(f"{folder}/**.py" for folder in FOLDERS)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    return [ROOT / name for name in listed if (ROOT / name).exists()]


def repeated(names: Iterable[tuple[str, Path]], allowed: frozenset[str]) -> Iterator[str]:
    """One complaint for each name outside `allowed` that stands in two or more files."""
    places = defaultdict(list)
    for name, path in names:
        places[name].append(path)
    for name, found in sorted(places.items()):
        if len(found) > 1 and name not in allowed:
            yield f"{name}: {', '.join(str(path.relative_to(ROOT)) for path in found)}"


def classes(paths: Iterable[Path]) -> Iterator[tuple[str, Path]]:
    for path in paths:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node.name, path


def main() -> int:
    paths = sources()
    files = [(path.name, path) for path in paths if path.name != "__init__.py"]
    complaints = [f"class {one}" for one in repeated(classes(paths), REPEATED_CLASSES)]
    complaints += [f"file {one}" for one in repeated(files, REPEATED_FILES)]
    complaints += [
        f"{path.relative_to(ROOT)}: the name says nothing" for name, path in files if path.stem in MEANINGLESS
    ]
    for complaint in complaints:
        sys.stdout.write(complaint + "\n")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
