"""The programs and files of docs/clients.md, by the heading above them."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "clients.md"
SHOWN_URL = "http://127.0.0.1:8000"
_SCRIPTED = {"tiny-llama": "chat-model", "minilm": "embed-model", "tiny-reranker": "rerank-model"}


def recipes(language: str = "python") -> dict[str, str]:
    """The first block in a language below each heading that has one."""
    found = re.findall(
        rf"^## ([^\n]+)\n(?:(?!^## ).)*?^```{language}\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S
    )
    return dict(found)


def on_scripted_engines(recipe: str, url: str) -> str:
    """The recipe for the models of `tests.controlplane.api.scripted_server` at `url`."""
    for shown, scripted in _SCRIPTED.items():
        recipe = recipe.replace(shown, scripted)
    return recipe.replace(SHOWN_URL, url)
