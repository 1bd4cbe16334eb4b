"""The programs of docs/clients.md, by the heading above them."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "clients.md"
SHOWN_URL = "http://127.0.0.1:8000"


def recipes() -> dict[str, str]:
    """Python programs by heading."""
    found = re.findall(
        r"^## ([^\n]+)\n(?:(?!^## ).)*?^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S
    )
    return dict(found)
