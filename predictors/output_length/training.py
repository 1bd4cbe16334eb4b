"""Trains the length model in a child process at the lowest CPU priority, so that requests are not delayed.

    python -m predictors.output_length.training SOURCE TARGET

reads the examples in the checkpoint SOURCE and writes the trained model to the checkpoint TARGET.
"""

import asyncio
import os
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE
from dataclasses import replace
from pathlib import Path

from predictors.output_length.checkpoint import Checkpoint, read, save
from predictors.output_length.quantile_model import LengthModel, fit

_NICENESS = 19
_TIMEOUT_SECONDS = 900.0


async def train_in_subprocess(checkpoint: Checkpoint) -> LengthModel:
    """Trains a model on the examples of a checkpoint in a child process.

    Cancelling the call kills the process.

    Raises:
        RuntimeError: the process failed; the message holds its stderr.
        TimeoutError: training took more than 15 minutes.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "examples.npz"), Path(folder, "model.npz")
        await asyncio.to_thread(save, source, replace(checkpoint, model=None))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "predictors.output_length.training", str(source), str(target)),
            stdout=DEVNULL,
            stderr=PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                _, errors = await process.communicate()
        finally:
            # On shutdown the training is abandoned.
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            raise RuntimeError(f"the training process failed: {errors.decode(errors='replace')[-2_000:]}")
        model = (await asyncio.to_thread(read, target)).model
    assert model is not None
    return model


def main(source: str, target: str) -> None:
    """Entry point of the child process."""
    os.nice(_NICENESS)
    checkpoint = read(Path(source))
    save(Path(target), Checkpoint(checkpoint.table.head(0), fit(checkpoint.table)))


if __name__ == "__main__":
    main(*sys.argv[1:])
