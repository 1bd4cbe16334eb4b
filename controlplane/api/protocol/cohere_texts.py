"""Bodies of POST /v2/embed, /v1/tokenize and /v1/detokenize, in Cohere's shapes.

As strict as all other bodies. Imports only `requests` and `types`.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from controlplane.api.protocol.requests import MAX_INPUTS, Name, Objectives, Priority
from controlplane.api.protocol.types import Text, conflict, expecting

EmbeddingType = Annotated[
    Literal["float", "base64"], expecting('"float" or "base64"; vectors are not quantized')
]


class CohereEmbedRequest(Objectives):
    """Body of POST /v2/embed. A text that is too long is cut at its end, as by Cohere and vLLM."""

    model: Name
    texts: Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
    input_type: Literal["search_document", "search_query", "classification", "clustering"] | None = None
    embedding_types: (
        Annotated[list[EmbeddingType], Field(min_length=1, max_length=2, fail_fast=True)] | None
    ) = None
    truncate: Literal["NONE", "START", "END"] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    output_dimension: Annotated[int, Field(ge=1)] | None = None
    priority: Priority = None

    # Known, not supported.
    images: None = None
    inputs: None = None

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        if self.max_tokens is not None and self.truncate == "NONE":
            raise conflict("max_tokens", 'cuts texts, which truncate="NONE" forbids; leave one of them out')
        return self


class CohereTokenizeRequest(Objectives):
    """Body of POST /v1/tokenize."""

    text: Text
    model: Name


class CohereDetokenizeRequest(Objectives):
    """Body of POST /v1/detokenize."""

    takes_token_ids = True

    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
    model: Name
