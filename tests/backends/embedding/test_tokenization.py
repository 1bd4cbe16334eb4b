"""Token ids of texts: four bytes each, since many texts may wait."""

import asyncio
import json

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from backends.embedding.ipc import Frame, FrameKind, pack_inputs
from backends.embedding.tokenization import PendingTokenizations, token_ids
from backends.embedding.truncation import Truncation
from controlplane.core.errors import Refused

WORDS = {"zero": 0, "many": 70_000, "more": 70_001}
TEXTS = ["many more many", "more"]
IDS = [[70_000, 70_001, 70_000], [70_001]]


def a_tokenizer() -> Tokenizer:
    found = Tokenizer(WordLevel(WORDS, unk_token="zero"))
    found.pre_tokenizer = Whitespace()
    return found


def test_tokens_take_four_bytes_each():
    found = token_ids(a_tokenizer(), TEXTS)
    assert [list(ids) for ids in found] == IDS
    assert [memoryview(ids).nbytes for ids in found] == [12, 4]


async def test_tokens_of_the_worker_take_four_bytes_each():
    pending, sent = PendingTokenizations(), asyncio.Queue[Frame]()
    task = asyncio.create_task(pending.tokenize(TEXTS, sent.put_nowait))
    asked = await sent.get()
    assert json.loads(asked.payload) == TEXTS
    packed = pack_inputs([np.array(ids, np.uint32) for ids in IDS])
    pending.resolve(Frame(FrameKind.TOKENS, asked.number, packed))
    found = await task
    assert [list(ids) for ids in found] == IDS
    assert [memoryview(ids).nbytes for ids in found] == [12, 4]


async def test_texts_that_are_normalized_to_many_times_as_long_are_not_tokenized():
    """18 characters of one; here and in the worker."""
    texts = ["\N{ARABIC LIGATURE SALLALLAHOU ALAYHE WASALLAM}" * 5_000]
    with pytest.raises(Refused, match="become 73,728 by NFKC"):
        token_ids(a_tokenizer(), texts)
    sent = asyncio.Queue[Frame]()
    with pytest.raises(Refused, match="become 73,728 by NFKC"):
        await PendingTokenizations().tokenize(texts, sent.put_nowait)
    assert sent.empty()


def test_what_is_cut_takes_four_bytes_each_too():
    (ids, _) = token_ids(a_tokenizer(), TEXTS)
    found = Truncation((), (), "left").truncate(ids, 2)
    assert list(found) == [70_001, 70_000]
    assert memoryview(found).nbytes == 8


def test_long_texts_are_tokenized_in_parts():
    """What a tokenizer takes for its work is freed between them."""
    sizes: list[int] = []

    class Observed:
        def encode_batch_fast(self, texts: list[str]) -> object:
            sizes.append(sum(map(len, texts)))
            return a_tokenizer().encode_batch_fast(texts)

    found = token_ids(Observed(), [*["many " * 10_000] * 5, "more " * 40_000, "many"])
    assert sizes == [100_000, 100_000, 50_000, 200_000, 4]
    assert [len(ids) for ids in found] == [*[10_000] * 5, 40_000, 1]
