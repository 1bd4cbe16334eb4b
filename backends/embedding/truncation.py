"""What is left of a text that is too long? Its begin or its end, still between the model's special tokens.

Rule: as a Hugging Face tokenizer cuts under `truncation=True, max_length=limit`: what it puts before and
after every text stays and counts, the text between gives way. So the vector of what is left is the one that
sentence-transformers gives under that `max_seq_length`. Ids that a client made keep those of the special
tokens that stand around them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from controlplane.core.errors import Refused
from controlplane.core.ports import TruncationSide

_PROBE = "a"


@dataclass(frozen=True, slots=True)
class Truncation:
    """`opening` and `closing` are the ids around every text; `side` is where the tokenizer itself cuts."""

    opening: tuple[int, ...] = ()
    closing: tuple[int, ...] = ()
    side: TruncationSide = "right"

    @classmethod
    def of(cls, tokenizer: Tokenizer, side: TruncationSide) -> "Truncation":
        """Raises ValueError for a tokenizer that sees nothing in a letter."""
        probe = tokenizer.encode(_PROBE)
        text = [position for position, is_special in enumerate(probe.special_tokens_mask) if not is_special]
        if not text:
            raise ValueError(f"the tokenizer has no token for {_PROBE!r}; serve a model with another")
        return cls(tuple(probe.ids[: text[0]]), tuple(probe.ids[text[-1] + 1 :]), side)

    @property
    def special_tokens(self) -> int:
        return len(self.opening) + len(self.closing)

    def truncate(self, ids: Sequence[int], limit: int, side: TruncationSide | None = None) -> Sequence[int]:
        """At most `limit` ids. Raises Refused when none of the text would be left."""
        if len(ids) <= limit:
            return ids
        begin, end = len(self.opening), len(ids) - len(self.closing)
        if tuple(ids[:begin]) != self.opening:
            begin = 0
        if tuple(ids[end:]) != self.closing:
            end = len(ids)
        special = begin + len(ids) - end
        if limit <= special:
            raise Refused(
                f"truncate_prompt_tokens={limit}: the model's {special} special tokens around a text leave "
                f"none of it; ask for at least {special + 1}",
                param="truncate_prompt_tokens",
            )
        length = limit - special
        kept = ids[end - length : end] if (side or self.side) == "left" else ids[begin : begin + length]
        return [*ids[:begin], *kept, *ids[end:]]
