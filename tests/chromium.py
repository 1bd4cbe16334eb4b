"""Chromium for tests of pages: its path and flags.

On Debian and Ubuntu `apt-get install chromium` brings one; TANDEM_BROWSER names another.
"""

import os
import shutil
from typing import Any

from tests.programs import SOURCES, missing

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = ["--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"]


def launch_options() -> dict[str, Any]:
    """Options of Playwright's `launch`; without Chromium as `programs.missing`."""
    path = os.environ.get("TANDEM_BROWSER") or next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        missing("chromium", f"{SOURCES['chromium']}, or name one in TANDEM_BROWSER")
    # Chromium's sandbox does not start as root, and continuous integration runs as root.
    flags = [*_FLAGS, "--no-sandbox"] if os.geteuid() == 0 else _FLAGS
    return {"executable_path": path, "args": flags}
