"""How is a model learned without delaying anyone? In a process of its own, with the lowest claim to a core.

    python -m predictors.training SOURCE TARGET

reads the examples in SOURCE (see `keeping`), and writes them with the model learned from them to TARGET.
"""

import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from predictors.keeping import Kept, read, save
from predictors.length_model import LengthModel, fit

_NICENESS = 19
_LONGEST_SECONDS = 900.0


def trained_elsewhere(kept: Kept) -> LengthModel:
    """Blocks: for a thread. Raises RuntimeError with what the process said."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "examples.npz"), Path(folder, "model.npz")
        save(source, replace(kept, model=None))
        command = [sys.executable, "-m", "predictors.training", str(source), str(target)]
        ran = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=_LONGEST_SECONDS,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        if ran.returncode:
            raise RuntimeError(f"the training process failed: {ran.stderr[-2_000:]}")
        model = read(target).model
    assert model is not None
    return model


def main(source: str, target: str) -> None:
    os.nice(_NICENESS)
    kept = read(Path(source))
    save(Path(target), Kept(kept.table.head(0), fit(kept.table)))


if __name__ == "__main__":
    main(*sys.argv[1:])
