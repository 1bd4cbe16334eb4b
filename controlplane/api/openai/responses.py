"""How is an answer sent whole? Gathered to its end, choice by choice, then as one JSON object."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import orjson
from starlette.types import Send

from controlplane.api.endpoint import send_json, ticket_headers
from controlplane.api.openai.answers import Tally, opened_answers
from controlplane.core.ports import Delta, TokenLogprob
from controlplane.service.gate.dispatcher import Dispatcher
from controlplane.service.gate.intake import GenerateJob


class Choice(ABC):
    """One sample, gathered."""

    def __init__(self, text: str = "") -> None:
        self.text = [text]
        self.logprobs: list[TokenLogprob] = []
        self._finish_reason: str | None = None
        self._stop_reason: str | int | None = None

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            self._finish_reason, self._stop_reason = delta.finish_reason, delta.stop_reason

    @abstractmethod
    def said(self) -> dict[str, object]:
        """What an endpoint calls its text."""

    def shown(self, index: int) -> dict[str, object]:
        ending = {"finish_reason": self._finish_reason, "stop_reason": self._stop_reason}
        return {"index": index, **self.said(), **ending}


async def send_whole(
    send: Send,
    dispatcher: Dispatcher,
    jobs: Sequence[GenerateJob],
    *,
    head: Mapping[str, object],
    choices: Sequence[Choice],
    tally: Tally,
) -> None:
    async with opened_answers(dispatcher, jobs) as (tickets, deltas):
        async for delta in deltas:
            tally.count(delta)
            choices[delta.index].add(delta)
    shown = [choice.shown(index) for index, choice in enumerate(choices)]
    reply = {**head, "choices": shown, "usage": tally.usage()}
    await send_json(send, orjson.dumps(reply), ticket_headers(tickets))
