"""Scores pairs of texts from token ids with sentence-transformers' CrossEncoder, bypassing its tokenizer.

A score equals `CrossEncoder.predict` of the pair, cut to the longest input; the loader verifies this on
probe pairs.
"""

from typing import Any

import numpy as np
import torch
from sentence_transformers import CrossEncoder

from backends.embedding.encoder import Encoder, Unsupported
from backends.embedding.pair_template import PairTemplate
from backends.embedding.truncation import Truncation

_PROBES = [
    ("Tandem", "Two kinds of work share one device, and neither waits for long."),
    ("How many kinds of work share one device?", "Two"),
    ("Which", ""),
]
# Tokens of both texts left of a truncated probe; the longest probes have more.
_TRUNCATED_PROBE_TOKENS = 5


class PairEncoder(Encoder):
    """A loaded cross-encoder with one label; a row is the score of a pair and the logit behind it."""

    def _load(self, model: str, **settings: Any) -> Any:
        loaded = CrossEncoder(model, **settings)
        if loaded.num_labels != 1:
            raise Unsupported(
                f"model {model!r}: it has {loaded.num_labels} labels, and a reranker needs one; serve another"
            )
        return loaded

    def _read_special_tokens(self) -> None:
        try:
            self._pairs = PairTemplate.of(self.raw_tokenizer, self.tokenizer.truncation_side)
        except ValueError as error:
            raise Unsupported(f"{error}; serve another model") from error
        # The template adds the special tokens, so that a query is tokenized once for all its documents.
        self.raw_tokenizer.post_processor = None
        self._truncation = Truncation(side=self.tokenizer.truncation_side)

    def _rows(self, features: dict[str, Any]) -> torch.Tensor:
        logits = self._model(features)["scores"].float()
        return torch.cat([self._model.activation_fn(logits), logits], dim=1)

    def _prompts(self) -> dict[str, str]:
        """None: `predict` puts a prompt before both texts, and the verification finds a default one."""
        return {}

    def _verify(self) -> int:
        """Returns 2. Raises Unsupported if token ids alone do not reproduce `predict`."""
        assert self._pairs is not None
        short = min(self.max_input_tokens, self._pairs.special_tokens + _TRUNCATED_PROBE_TOKENS)
        self._verify_pairs(self._pairs, short)
        return self._verify_pairs(self._pairs, self.max_input_tokens)

    def _verify_pairs(self, template: PairTemplate, limit: int) -> int:
        self._model.max_seq_length = limit
        keep = torch.nn.Identity()
        rows = [
            self._model.predict(_PROBES, activation_fn=activation, show_progress_bar=False)
            for activation in (self._model.activation_fn, keep)
        ]
        inputs = [
            np.array(template.join(self._bare_ids(query), self._bare_ids(document), limit), dtype=np.uint32)
            for query, document in _PROBES
        ]
        expected = np.stack(rows, axis=1)
        return self._verify_rows(inputs, expected, f"predict() for pairs of at most {limit} tokens")

    def _bare_ids(self, text: str) -> list[int]:
        found: list[int] = self.raw_tokenizer.encode(text).ids
        return found
