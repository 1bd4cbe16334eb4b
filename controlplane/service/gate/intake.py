"""What exactly is asked? Names, objectives and token counts are checked and fixed before anyone waits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TypeVar

from controlplane.core.clock import Clock, Instant, milliseconds
from controlplane.core.errors import Refused
from controlplane.core.forecast import LengthForecast
from controlplane.core.generation import ChatPrompt, Sampling
from controlplane.core.memory import Footprint, generate_footprint
from controlplane.core.ports import Embedder, Generator, Vectors
from controlplane.core.request import Kind, PromptFeatures, Request, Timeline
from controlplane.core.slo import ServiceClass, Slo
from controlplane.service.jobs import (
    MODEL_LIMIT,
    Caller,
    EmbedJob,
    GenerateJob,
    RequestHints,
    TruncationRequest,
)
from controlplane.service.prediction.fail_open import FailOpen, GuardedLengthPredictor, Subject
from controlplane.service.prediction.prompt_vector_cache import PromptVectorCache
from controlplane.service.ticket import Ticket
from predictors.output_length.features import asked_text, gist_of, gist_of_chat


@dataclass(frozen=True, slots=True)
class _RequestFields:
    request_id: str
    caller: Caller
    hints: RequestHints
    arrival: Instant
    features: PromptFeatures | None = None


class Intake:
    """All methods raise Refused naming the field of the request body that is at fault."""

    def __init__(
        self,
        clock: Clock,
        generators: Mapping[str, Generator],
        embedders: Mapping[str, Embedder],
        classes: Mapping[str, ServiceClass],
        default_class: str,
        *,
        fail_open: FailOpen,
        keeps_features: bool = False,
        prompt_vectors: PromptVectorCache | None = None,
    ) -> None:
        """`keeps_features`: requests carry what the length predictor reads of a prompt, and the vector of its
        last turn if it is among those seen."""
        self._clock = clock
        self._generators = generators
        self._embedders = embedders
        self._classes = classes
        self._default_class = default_class
        self._fail_open = fail_open
        self._keeps_features = keeps_features
        self._prompt_vectors = prompt_vectors
        self._serial = count(1)

    async def chat(
        self,
        request_id: str,
        caller: Caller,
        model: str,
        prompt: ChatPrompt,
        *,
        max_tokens: int | None,
        sampling: Sampling,
        hints: RequestHints,
    ) -> GenerateJob:
        arrival = self._clock.now()
        generator = self._generator(model)
        token_ids = await generator.render_chat(prompt)
        gist = gist_of_chat(prompt.messages) if self._keeps_features else None
        if gist is not None and self._prompt_vectors is not None:
            gist = self._prompt_vectors.with_vector(gist, asked_text(prompt.messages))
        draft = _RequestFields(request_id, caller, hints, arrival, gist)
        return self._generate(draft, generator, token_ids, max_tokens, sampling, prompt)

    async def completion(
        self,
        request_id: str,
        caller: Caller,
        model: str,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None,
        sampling: Sampling,
        hints: RequestHints,
        unstated: int | None = None,
    ) -> GenerateJob:
        """Without `max_tokens` the answer may have `unstated`, if so many fit, or else what fits."""
        arrival = self._clock.now()
        generator = self._generator(model)
        token_ids = await generator.tokenize(prompt) if isinstance(prompt, str) else prompt
        gist = gist_of(prompt) if self._keeps_features and isinstance(prompt, str) else None
        if gist is not None and self._prompt_vectors is not None and isinstance(prompt, str):
            gist = self._prompt_vectors.with_vector(gist, prompt)
        draft = _RequestFields(request_id, caller, hints, arrival, gist)
        return self._generate(draft, generator, token_ids, max_tokens, sampling, None, unstated=unstated)

    async def embeddings(
        self,
        request_id: str,
        caller: Caller,
        model: str,
        inputs: Sequence[str] | Sequence[Sequence[int]],
        hints: RequestHints,
        *,
        cut: TruncationRequest | None = None,
        prompt: str | None = None,
    ) -> EmbedJob:
        """Without a `truncate` an input that is too long is refused. `prompt` names what the model puts
        before
        texts; token ids are taken as they are."""
        arrival = self._clock.now()
        embedder = _named(self._embedders, model, "embeddings", others=self._generators)
        texts = [text for text in inputs if isinstance(text, str)]
        given = [ids for ids in inputs if not isinstance(ids, str)]
        if given and prompt is not None:
            raise Refused(
                f"prompt_name={prompt!r}: a prompt goes before a text, and these are token ids; send texts "
                "or put the prompt's tokens in",
                param="prompt_name",
            )
        limit = None if cut is None else _limit(cut, embedder)
        token_ids = await embedder.tokenize(texts, prompt=prompt) if texts else given
        if cut is not None and limit is not None:
            token_ids = [embedder.truncate(ids, limit, cut.side) for ids in token_ids]
        for position, ids in enumerate(token_ids):
            if not ids:
                raise Refused(
                    f"input[{position}] has no tokens: {model} sees nothing in it; leave it out",
                    param="input",
                )
            if len(ids) > embedder.max_input_tokens:
                raise Refused(
                    f"input[{position}] has {len(ids):,} tokens; {model} takes at most "
                    f"{embedder.max_input_tokens:,}. Split or shorten it.",
                    param="input",
                    code="context_length_exceeded",
                )
            if given and max(ids) >= embedder.vocabulary:
                raise Refused(
                    f"input[{position}] has token id {max(ids)}; those of {model} run to "
                    f"{embedder.vocabulary - 1:,}. Tokenise with its own tokenizer.",
                    param="input",
                )
        draft = _RequestFields(request_id, caller, hints, arrival)
        tokens = sum(map(len, token_ids))
        request = self._request(draft, Kind.EMBED, model, tokens, 0, len(token_ids))
        is_plain = prompt is None and cut in (None, MODEL_LIMIT)
        return EmbedJob(request, token_ids, texts if is_plain else ())

    def remember_vectors(self, job: EmbedJob, vectors: Vectors) -> None:
        """A prompt that was embedded is better foretold."""
        if self._prompt_vectors is None or not job.texts:
            return
        with self._fail_open[Subject.PROMPT_VECTORS]:
            self._prompt_vectors.store(job.request.model, job.texts, vectors)

    def _generate(
        self,
        draft: _RequestFields,
        generator: Generator,
        prompt: Sequence[int],
        max_tokens: int | None,
        sampling: Sampling,
        chat: ChatPrompt | None,
        *,
        unstated: int | None = None,
    ) -> GenerateJob:
        room = generator.max_model_tokens - len(prompt)
        wanted = 1 if max_tokens is None else max_tokens
        if not prompt:
            raise Refused("the prompt has no tokens; send at least one", param="prompt")
        if wanted > room:
            asks = (
                "leaves no room to answer" if max_tokens is None else f"max_tokens asks for {wanted:,} more"
            )
            raise Refused(
                f"{generator.model} has a context of {generator.max_model_tokens:,} tokens; the prompt has "
                f"{len(prompt):,} and {asks}. Shorten the prompt or lower max_tokens.",
                param="messages" if chat else "prompt",
                code="context_length_exceeded",
            )
        limit = min(room, unstated or room) if max_tokens is None else max_tokens
        request = self._request(draft, Kind.GENERATE, generator.model, len(prompt), limit, sampling.n)
        can_stop = sampling.stop or sampling.stop_token_ids or sampling.structure is not None
        request = replace(request, runs_to_limit=sampling.ignore_eos and not can_stop)
        return GenerateJob(request, prompt, replace(sampling, max_tokens=limit), chat)

    def _request(
        self,
        draft: _RequestFields,
        kind: Kind,
        model: str,
        prompt_tokens: int,
        max_output_tokens: int,
        sequences: int,
    ) -> Request:
        hints = draft.hints
        service_class = self._class(draft.caller, hints)
        stated = [
            None if value is None else milliseconds(value)
            for value in (hints.ttft_ms, hints.tpot_ms, hints.e2e_ms)
        ]
        slo = service_class.slo.overridden(Slo(*stated)) if any(stated) else service_class.slo
        if kind is Kind.EMBED and slo.tpot is not None:
            # There are no tokens to pace, so nothing is promised that could be kept.
            slo = replace(slo, tpot=None)
        return Request(
            # Callers choose their ids and may choose the same one twice.
            id=f"{draft.request_id}-{next(self._serial)}",
            kind=kind,
            model=model,
            tenant=draft.caller.tenant,
            service_class=service_class,
            slo=slo,
            arrival=draft.arrival,
            prompt_tokens=prompt_tokens,
            max_output_tokens=max_output_tokens,
            sequences=sequences,
            features=draft.features,
        )

    def _class(self, caller: Caller, hints: RequestHints) -> ServiceClass:
        allowed = caller.allowed_classes
        name = hints.service_class
        if name is None:
            # A tenant that may not use the default class gets the first one that it may.
            usable = allowed is None or self._default_class in allowed
            name = self._default_class if usable else min(allowed or {self._default_class})
        if name not in self._classes:
            known = ", ".join(sorted(self._classes))
            raise Refused(
                f"service_class={name!r}: no such class; known are {known}",
                param="service_class",
                code="unknown_service_class",
            )
        if allowed is not None and name not in allowed:
            raise Refused(
                f"service_class={name!r}: this key may use {', '.join(sorted(allowed))}",
                param="service_class",
                code="service_class_not_allowed",
            )
        return self._classes[name]

    def _generator(self, model: str) -> Generator:
        return _named(self._generators, model, "chat and completions", others=self._embedders)


def _limit(cut: TruncationRequest, embedder: Embedder) -> int:
    most = embedder.max_input_tokens
    if cut.tokens is not None and cut.tokens > most:
        raise Refused(
            f"truncate_prompt_tokens={cut.tokens}: {embedder.model} takes at most {most:,}; lower it, or "
            "use -1 for that",
            param="truncate_prompt_tokens",
        )
    return most if cut.tokens is None else cut.tokens


_Backend = TypeVar("_Backend")


def _named(
    table: Mapping[str, _Backend], model: str, purpose: str, *, others: Mapping[str, object]
) -> _Backend:
    if model in table:
        return table[model]
    served = ", ".join(sorted(table)) or "none"
    if model in others:
        raise Refused(f"{model!r} does not do {purpose}; models that do: {served}", param="model")
    raise Refused(
        f"the model {model!r} does not exist; models for {purpose}: {served}",
        param="model",
        code="model_not_found",
    )


# FOLDED drafting.py:
# What will a job take? Its ticket, as it stands before anybody has decided about it.


def make_ticket(
    job: GenerateJob | EmbedJob,
    generators: Mapping[str, Generator],
    embedders: Mapping[str, Embedder],
    lengths: GuardedLengthPredictor,
) -> Ticket:
    request = job.request
    forecast: LengthForecast | None = None
    if isinstance(job, EmbedJob):
        size = embedders[request.model].batch_bytes([len(ids) for ids in job.inputs])
        # Two batches' worth are sent: one is computed while the next is made up, and takes no memory yet.
        footprint = Footprint(base=-(-size // 2), steps=max(1, request.prompt_tokens), worst=size)
    else:
        forecast = lengths.forecast(request)
        footprint = generate_footprint(
            generators[request.model].geometry,
            prompt_tokens=request.prompt_tokens,
            max_output_tokens=request.max_output_tokens,
            expected_tokens=forecast.mean,
            deviation_tokens=forecast.deviation,
            sequences=request.sequences,
        )
    return Ticket(request, footprint, forecast, Timeline(request.arrival))
