"""How is a model learned without delaying anyone? In a process of its own, with the lowest claim to a core.

    python -m predictors.output_length.training SOURCE TARGET

reads the examples in SOURCE (see `keeping`), and writes them with the model learned from them to TARGET.
"""

import asyncio
import os
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE
from dataclasses import replace
from pathlib import Path

from predictors.output_length.checkpoint import Checkpoint, read, save
from predictors.output_length.model import LengthModel, fit

_NICENESS = 19
_TIMEOUT_SECONDS = 900.0


async def trained_elsewhere(kept: Checkpoint) -> LengthModel:
    """Raises RuntimeError with what the process said, TimeoutError. Cancelling it ends the process."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "examples.npz"), Path(folder, "model.npz")
        await asyncio.to_thread(save, source, replace(kept, model=None))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "predictors.output_length.training", str(source), str(target)),
            stdout=DEVNULL,
            stderr=PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                _, said = await process.communicate()
        finally:
            # A server that stops does not wait until it has learned.
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            raise RuntimeError(f"the training process failed: {said.decode(errors='replace')[-2_000:]}")
        model = (await asyncio.to_thread(read, target)).model
    assert model is not None
    return model


def main(source: str, target: str) -> None:
    os.nice(_NICENESS)
    kept = read(Path(source))
    save(Path(target), Checkpoint(kept.table.head(0), fit(kept.table)))


if __name__ == "__main__":
    main(*sys.argv[1:])
