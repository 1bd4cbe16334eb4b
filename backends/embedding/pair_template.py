"""Joins the token ids of a query and a document to one input, as a cross-encoder's tokenizer joins two texts.

Both are tokenized once and without special tokens, so a query with 100 documents is tokenized once. A joined
input carries the token type (BERT's segment) of each token in the highest bit of its id; `split_types`
separates them again in the worker. Models whose tokens have one type only have a zero there.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from backends.embedding.ipc import Ids
from controlplane.core.errors import Refused
from controlplane.core.ports import TruncationSide

_TYPE_SHIFT = 31
_ID_MASK = (1 << _TYPE_SHIFT) - 1
_PROBE = "a"


def split_types(ids: Ids) -> tuple[Ids, Ids]:
    """Returns token ids and token types (0 or 1) of joined inputs; other ids have type 0."""
    return ids & np.uint32(_ID_MASK), ids >> np.uint32(_TYPE_SHIFT)


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """Special tokens before, between and after the texts of a pair, with their types, and the side to cut.

    `document_type` is the type of the document's tokens; those of the query have type 0.
    """

    opening: tuple[int, ...]
    middle: tuple[int, ...]
    closing: tuple[int, ...]
    document_type: int
    side: TruncationSide = "right"

    @classmethod
    def of(cls, tokenizer: Tokenizer, side: TruncationSide) -> "PairTemplate":
        """Reads the special tokens from an encoded pair. Raises ValueError if the second text is not last."""
        found = tokenizer.encode(_PROBE, _PROBE)
        sequences = found.sequence_ids
        if 0 not in sequences or 1 not in sequences or sequences.index(0) > sequences.index(1):
            raise ValueError("the tokenizer does not put a second text behind the first one")
        tagged = [one | kind << _TYPE_SHIFT for one, kind in zip(found.ids, found.type_ids, strict=True)]
        query, document = sequences.index(0), sequences.index(1)
        query_end, document_end = query + sequences.count(0), document + sequences.count(1)
        if found.type_ids[query] != 0 or found.type_ids[document] not in (0, 1):
            raise ValueError(f"the tokenizer gives the texts the token types {sorted({*found.type_ids})}")
        return cls(
            tuple(tagged[:query]),
            tuple(tagged[query_end:document]),
            tuple(tagged[document_end:]),
            found.type_ids[document],
            side,
        )

    @property
    def special_tokens(self) -> int:
        """Number of special tokens in a pair."""
        return len(self.opening) + len(self.middle) + len(self.closing)

    def join(
        self, query: Sequence[int], document: Sequence[int], limit: int, side: TruncationSide | None = None
    ) -> Sequence[int]:
        """One input of at most `limit` tokens; the longer text is cut first, at `side`.

        Equals a Hugging Face tokenizer with `truncation="longest_first", max_length=limit`, whose side None
        stands for. Raises Refused if no token of a text would be left.
        """
        room = limit - self.special_tokens
        if room < 2:
            raise Refused(
                f"truncate_prompt_tokens={limit}: the model's {self.special_tokens} special tokens leave no "
                f"room for a query and a document; set at least {self.special_tokens + 2}",
                param="truncate_prompt_tokens",
            )
        query_tokens, document_tokens = _longest_first(len(query), len(document), room)
        cuts_left = (side or self.side) == "left"
        joined = array("I", self.opening)
        joined.extend(_cut(query, query_tokens, left=cuts_left))
        joined.extend(self.middle)
        tag = self.document_type << _TYPE_SHIFT
        kept = _cut(document, document_tokens, left=cuts_left)
        joined.extend([one | tag for one in kept] if tag else kept)
        joined.extend(self.closing)
        return joined


def _longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Lengths of two texts cut to `room` tokens together, as in the library `tokenizers`."""
    if first + second <= room:
        return first, second
    shorter = min(first, second)
    longer = max(shorter, room - shorter)
    if shorter + longer > room:
        shorter, longer = room // 2, room // 2 + room % 2
    return (shorter, longer) if first <= second else (longer, shorter)


def _cut(ids: Sequence[int], length: int, *, left: bool) -> Sequence[int]:
    return ids[len(ids) - length :] if left else ids[:length]
