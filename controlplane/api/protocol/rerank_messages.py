"""Bodies and answers of reranking and scoring, in the shapes of Cohere, Jina, vLLM and TEI.

TEI is text-embeddings-inference. Bodies are as strict as all others. Imports only `requests` and `types`.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from typing_extensions import TypedDict

from controlplane.api.protocol.requests import MAX_INPUTS, Name, Objectives, Padding, Priority, Usage
from controlplane.api.protocol.types import OPEN, Described, Ignored, Text, conflict, expecting

_DOCUMENTS = f'a string or a list of 1 to {MAX_INPUTS} strings or {{"text": …}} objects'
_TEXTS = f"a non-empty string or a list of 1 to {MAX_INPUTS} strings"


class TextDocument(TypedDict):
    """A document as an object; further members are returned unchanged."""

    __pydantic_config__ = OPEN  # type: ignore[misc]
    text: str


# An empty document is scored, so that one empty chunk does not fail a request of 100.
Documents = Annotated[
    str | Annotated[list[str | TextDocument], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)],
    expecting(_DOCUMENTS),
]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
Scored = Annotated[Text | Texts, expecting(_TEXTS)]
KeptTokens = Annotated[
    Literal[-1] | Annotated[int, Field(ge=1)] | None,
    expecting("the number of tokens to keep, at least 1, or -1 for as many as the model takes"),
]
# Fields that only one of the two bodies of /rerank has.
_OF_TEXTS = ("raw_scores", "return_text", "truncate", "truncation_direction")
_OF_DOCUMENTS = (
    *("return_documents", "use_activation"),
    *("max_tokens_per_query", "max_tokens_per_doc"),
)
# vLLM's default is 0, which sets no limit.
OptionalLimit = Annotated[int, Field(ge=0)] | None

SIDES = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))
_SIDE_FIELDS = tuple(dict.fromkeys(name for sides in SIDES for name in sides))


class PairFields(Objectives):
    """Fields of every request that scores pairs. Pairs that are too long are cut, as CrossEncoder does."""

    # Required only if several rerankers are served, as in vLLM and TEI.
    model: Name | None = None
    # vLLM's fields.
    truncate_prompt_tokens: KeptTokens = None
    truncation_side: Literal["left", "right"] | None = None
    max_tokens_per_query: OptionalLimit = None
    # Also Cohere's field.
    max_tokens_per_doc: OptionalLimit = None
    use_activation: bool | None = None
    user: Ignored[str] = None

    # Known, not supported.
    cache_salt: None = None
    chat_template_kwargs: None = None
    instruction: None = None
    mm_processor_kwargs: None = None
    padding: Padding = None
    priority: Priority = None
    request_id: None = None


class RankingFields(PairFields):
    """Fields of one query whose documents are ranked."""

    query: Text
    top_n: OptionalLimit = None
    return_documents: bool | None = None

    # Known, not supported.
    max_chunks_per_doc: None = None
    rank_fields: None = None


class RerankRequest(RankingFields):
    """Body of POST /v1/rerank and /v2/rerank."""

    documents: Documents


class EitherRerankRequest(RankingFields):
    """Body of POST /rerank: that of /v1/rerank, or TEI's with `texts`."""

    documents: Documents | None = None
    # TEI's fields.
    texts: Texts | None = None
    raw_scores: bool | None = None
    return_text: bool | None = None
    truncate: bool | None = None
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = None

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if (self.documents is None) == (self.texts is None):
            raise conflict("documents", "give either documents or texts (text-embeddings-inference)")
        owner, foreign = ("texts", _OF_TEXTS) if self.texts is None else ("documents", _OF_DOCUMENTS)
        for name in foreign:
            if getattr(self, name) is not None:
                raise conflict(name, f"belongs to a request with {owner}; leave it out")
        return self


class ScoreRequest(PairFields):
    """Body of POST /v1/score and /score: one text with each of several, or pairs, named as in SIDES."""

    queries: Scored | None = None
    documents: Scored | None = None
    items: Scored | None = None
    data_1: Scored | None = None
    data_2: Scored | None = None
    text_1: Scored | None = None
    text_2: Scored | None = None

    @property
    def sides(self) -> tuple[str, str]:
        """Names of the fields with the texts."""
        return next(sides for sides in SIDES if all(getattr(self, name) is not None for name in sides))

    def texts(self, field: str) -> list[str]:
        """The texts of a field as a list."""
        found: str | list[str] = getattr(self, field)
        return [found] if isinstance(found, str) else found

    @model_validator(mode="after")
    def _has_both_sides(self) -> Self:
        stated = [name for name in _SIDE_FIELDS if getattr(self, name) is not None]
        if not stated:
            raise conflict("queries", "missing; give queries and documents, or text_1 and text_2")
        shapes = [sides for sides in SIDES if stated[0] in sides]
        if len(stated) == 1:
            (missing,) = {*shapes[0]} - {*stated}
            raise conflict(missing, f"missing; it belongs to {stated[0]}")
        if not any({*stated} == {*sides} for sides in shapes):
            known = {name for sides in shapes for name in sides}
            extra = next((name for name in stated if name not in known), stated[-1])
            others = " and ".join(name for name in stated if name != extra)
            raise conflict(extra, f"does not belong to {others}; leave it out")
        return self


class RankedDocument(Described):
    """One document with its score, in the order of the scores."""

    index: int
    relevance_score: float
    document: dict[str, Any] | None = None


class BilledUnits(Described):
    """Cohere's count: one search per request."""

    search_units: int


class InputTokens(Described):
    """Cohere's token count."""

    input_tokens: int


class RerankMeta(Described):
    """Cohere's `meta`."""

    billed_units: BilledUnits
    tokens: InputTokens


class RerankResponse(Described):
    """Answer of /v1/rerank, /v2/rerank, and /rerank with documents."""

    id: str
    model: str
    results: list[RankedDocument]
    meta: RerankMeta
    usage: Usage


class RankedText(Described):
    """An item of TEI's answer, a list in the order of the scores."""

    index: int
    score: float
    text: str | None = None


class PairScore(Described):
    """The score of one pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreResponse(Described):
    """Answer of /v1/score and /score."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PairScore]
    usage: Usage
