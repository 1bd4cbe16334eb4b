"""Section `predictors`: the training data and the checkpoint of the output-length predictor."""

from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass as section

from controlplane.config.fields import STRICT, Milliseconds


@section(frozen=True, config=STRICT)
class PredictorsSection:
    """The output-length predictor of `admission.length_predictor: learned`."""

    file: Path | None = None
    """Checkpoint: loaded at the start, written after each training and at the end; none by default.
    It holds lengths, hashed words and vectors of prompts, no text."""
    encoder: str | None = None
    """Name of one of `models.embeddings`. If it has embedded the last message of a prompt before,
    that vector is a feature of the forecast."""
    train_every_ms: Milliseconds = 60_000
    """Interval of the checks for enough new examples to train again."""
    max_examples: Annotated[int, Field(ge=200, le=100_000)] = 8_192
    """Finished requests to keep as training examples; older ones are dropped."""
