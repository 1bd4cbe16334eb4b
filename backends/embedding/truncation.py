"""Truncates token ids at either side of the text and keeps the model's special tokens around it.

The result equals that of a Hugging Face tokenizer with `truncation=True, max_length=limit`: the special
tokens stay and count towards the limit. The vector is therefore the one that sentence-transformers computes
under that `max_seq_length`. Token ids sent by a client keep the special tokens that they contain.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from controlplane.core.errors import Refused
from controlplane.core.ports import TruncationSide

_PROBE = "a"


@dataclass(frozen=True, slots=True)
class Truncation:
    """Special tokens before (`opening`) and after (`closing`) every text, and the tokenizer's own `side`."""

    opening: tuple[int, ...] = ()
    closing: tuple[int, ...] = ()
    side: TruncationSide = "right"

    @classmethod
    def of(cls, tokenizer: Tokenizer, side: TruncationSide) -> "Truncation":
        """Reads the special tokens from an encoded probe text.

        Raises ValueError if the tokenizer has no token for a letter.
        """
        probe = tokenizer.encode(_PROBE)
        text = [position for position, is_special in enumerate(probe.special_tokens_mask) if not is_special]
        if not text:
            raise ValueError(
                f"the tokenizer has no token for {_PROBE!r}; serve a model with another tokenizer"
            )
        return cls(tuple(probe.ids[: text[0]]), tuple(probe.ids[text[-1] + 1 :]), side)

    @property
    def special_tokens(self) -> int:
        """Number of special tokens around a text."""
        return len(self.opening) + len(self.closing)

    def truncate(self, ids: Sequence[int], limit: int, side: TruncationSide | None = None) -> Sequence[int]:
        """Returns at most `limit` of the ids, cut at `side` (None: the tokenizer's own side).

        Raises Refused if no token of the text would remain.
        """
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
                f"no room for it; set at least {special + 1}",
                param="truncate_prompt_tokens",
            )
        length = limit - special
        kept = ids[end - length : end] if (side or self.side) == "left" else ids[begin : begin + length]
        cut = [*ids[:begin], *kept, *ids[end:]]
        return array("I", cut) if isinstance(ids, array) else cut
