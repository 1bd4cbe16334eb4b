"""How is what was measured kept? The file is replaced in one step, by something whole.

Rule: until a measurement, or a part of it that stands by itself, is complete, the file of before stays. So a
run that is interrupted takes nothing away, and a reader sees the old figures or the new ones.
"""

import json
from pathlib import Path


def keep(file: Path, found: object) -> None:
    """As JSON."""
    put(file, json.dumps(found, indent=1) + "\n")


def put(file: Path, text: str) -> None:
    scratch = file.with_name(f".{file.name}")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(file)
