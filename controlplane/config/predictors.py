"""What may be learned of the traffic, and where is it kept?"""

from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass as section

from controlplane.config.fields import STRICT, Milliseconds


@section(frozen=True, config=STRICT)
class PredictorsSection:
    """For `admission.length_predictor: learned`. `file` keeps what was learned across restarts; the last
    `max_examples` finished requests are learned from, of whose prompts only numbers and hashed words are kept. `encoder`
    names one of `models.embeddings`: where it has embedded a prompt's last turn before, its vector is
    learned from too, and kept."""

    file: Path | None = None
    encoder: str | None = None
    train_every_ms: Milliseconds = 60_000
    max_examples: Annotated[int, Field(ge=200, le=100_000)] = 8_192
