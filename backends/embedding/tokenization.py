"""Which texts does the worker turn into tokens now? Each question waits for its own answer, or for the
worker's end."""

import asyncio
import json
from collections.abc import Callable, Sequence
from itertools import count

import numpy as np
from tokenizers import Tokenizer

from backends.embedding.ipc import Frame, FrameKind, unpack_inputs
from controlplane.core.ports import BackendDown


def token_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    return [found.ids for found in tokenizer.encode_batch_fast(list(texts))]


class TextsUnderWay:
    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = count(1)

    async def tokenized(self, texts: Sequence[str], ask: Callable[[Frame], None]) -> list[list[int]]:
        """Raises BackendDown also for a text with no tokens to give."""
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        ask(Frame(FrameKind.TEXTS, number, json.dumps(list(texts)).encode()))
        try:
            payload = await answer
        finally:
            del self._waiting[number]
        if not payload:
            raise BackendDown("the embedding worker could not tokenise")
        lengths, ids = unpack_inputs(payload)
        return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]

    def answered(self, frame: Frame) -> None:
        waiting = self._waiting.get(frame.batch)
        if waiting is not None and not waiting.done():
            waiting.set_result(frame.payload)

    def lost(self, why: str) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(BackendDown(why))
