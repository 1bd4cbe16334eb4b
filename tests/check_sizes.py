"""Fails if a file has 400 lines or more, or a function 60 or more. Run by `make lint`."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("controlplane", "predictors", "backends", "kernels", "benchmark_control_plane", "tests")
FILE_LINES = 400
FUNCTION_LINES = 60


def oversized(source: str) -> Iterator[tuple[int, str]]:
    """(line, complaint) for one file's text."""
    if (lines := source.count("\n")) >= FILE_LINES:
        yield 1, f"{lines} lines: a file stays under {FILE_LINES}; split it by question"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length >= FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {length} lines: a function stays under {FUNCTION_LINES}"


def main() -> int:
    complaints = 0
    for path in sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")):
        for line, complaint in oversized(path.read_text(encoding="utf-8")):
            complaints += 1
            sys.stdout.write(f"{path.relative_to(ROOT)}:{line}: {complaint}\n")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
