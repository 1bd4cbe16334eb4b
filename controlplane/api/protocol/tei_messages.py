"""Body and answer of POST /embed and /, in the shapes of text-embeddings-inference.

`rerank_messages` has those of its /rerank. As strict as all other bodies. Imports only `requests`.
"""

from typing import Annotated, Literal

from pydantic import Field, RootModel

from controlplane.api.protocol.requests import EmbeddingInputs, Name, Objectives, listed


class TeiEmbedRequest(Objectives):
    """Body of POST /embed and /."""

    takes_token_ids = True

    # Required only if several embedding models are served.
    model: Name | None = None
    inputs: EmbeddingInputs
    # Without it an input that is too long is refused, not truncated.
    truncate: bool | None = None
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = None
    prompt_name: Name | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    # Unit length by default; with false the vectors are those of /v1/embeddings.
    normalize: bool | None = None

    @property
    def listed(self) -> list[str] | list[list[int]]:
        """The inputs as a list."""
        return listed(self.inputs)


class TeiVector(RootModel[list[float]]):
    """An item of the answer, a list in the order of the inputs."""
