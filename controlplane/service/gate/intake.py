"""Turns wire requests into jobs, and jobs into tickets with a footprint and a forecast.

Names, objectives and token counts are checked here, before a request enters a queue.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from controlplane.config import Config
from controlplane.config.limits_section import LimitsSection
from controlplane.core.clock import Clock
from controlplane.core.errors import Refused
from controlplane.core.forecast import LengthForecast
from controlplane.core.generation import ChatPrompt, Sampling, SamplingDefaults
from controlplane.core.memory_ledger import Footprint, generate_footprint
from controlplane.core.ports import Embedder, Generator, LengthPredictor, Vectors
from controlplane.core.request import Kind, PromptFeatures, Timeline
from controlplane.core.text_limits import content_length
from controlplane.service.encoder_registry import EncoderRegistry
from controlplane.service.gate.chat_rendering import ChatRendering, rendering_length
from controlplane.service.gate.pair_intake import PairIntake
from controlplane.service.gate.policies import terms_of
from controlplane.service.gate.prompt_preparation import GrammarChecks, PromptTokenizer
from controlplane.service.gate.request_builder import RequestBuilder, RequestFields, named_backend
from controlplane.service.gate.request_limits import (
    answer_limit,
    bounded_texts,
    check_prompt_logprobs,
    embed_job_to_charge,
    generate_job_to_charge,
    require_special_tokens,
    text_limit,
    truncation_limit,
)
from controlplane.service.gate.text_tokenization import TextTokenization
from controlplane.service.prediction.fail_open import FailOpen, GuardedLengthPredictor, Subject
from controlplane.service.prediction.prompt_vector_cache import PromptVectorCache
from controlplane.service.request_jobs import (
    MODEL_LIMIT,
    EmbedJob,
    GenerateJob,
    RequestOrigin,
    RequestTerms,
    TruncationRequest,
)
from controlplane.service.ticket import Ticket
from predictors.output_length.features import chat_features, last_user_text, prompt_features
from predictors.output_length.learned_predictor import LearnedLengths


class Intake:
    """Validates and tokenizes requests; raises Refused naming the field of the body that is invalid."""

    def __init__(
        self,
        clock: Clock,
        generators: Mapping[str, Generator],
        encoders: EncoderRegistry,
        terms: RequestTerms,
        *,
        fail_open: FailOpen,
        charge: Callable[[GenerateJob | EmbedJob], None],
        limits: LimitsSection,
        keeps_features: bool = False,
        prompt_vectors: PromptVectorCache | None = None,
    ) -> None:
        """Builds the intake of these models.

        A generator has the name of its model and those of its adapters.
        `charge` charges a job to its tenant's rate limits before costly work, and raises Rejected. With
        `keeps_features` requests carry the prompt features of the length predictor, and the vector of the
        last user message if `prompt_vectors` holds it.
        """
        self._generators = generators
        self._encoders = encoders
        self._served = (generators, encoders)
        self._requests = RequestBuilder(clock, terms)
        self._fail_open = fail_open
        self._tokenizer = PromptTokenizer(limits.tokenizer_threads, charge)
        self.pairs = PairIntake(encoders, self._served, self._requests, self._tokenizer)
        self._chats = ChatRendering(limits)
        self.tokenization = TextTokenization(
            generators, self._served, self._requests, self._tokenizer, self._chats
        )
        self._grammars = GrammarChecks(limits.grammar_processes, charge)
        self._keeps_features = keeps_features
        self._prompt_vectors = prompt_vectors

    def set_terms(self, terms: RequestTerms, limits: LimitsSection) -> None:
        """Builds requests by `terms` from now on, unless their caller has others, and resizes the slots."""
        self._requests.terms = terms
        self._chats.set_limits(limits)
        self._tokenizer.slots.resize(limits.tokenizer_threads)
        self._grammars.slots.resize(limits.grammar_processes)

    async def chat(
        self,
        origin: RequestOrigin,
        model: str,
        prompt: ChatPrompt,
        *,
        max_tokens: int | None,
        sampling: Sampling,
    ) -> GenerateJob:
        """The job of a conversation, rendered by the model's chat template. Raises Refused, Rejected."""
        generator = self._generator(model)
        fields = self._requests.fields(origin, _adapter(model, generator))
        prompt = self._chats.opened(generator, prompt)
        (token_ids, prompt), charged = await self._tokenizer.tokenize(
            rendering_length(prompt),
            partial(self._chats.render, generator, prompt, choices=sampling.n),
            partial(
                generate_job_to_charge, self._requests, fields, generator, content_length(prompt), sampling
            ),
        )
        token_ids = array("I", token_ids)
        features = None
        if self._keeps_features:
            features = self._with_vector(chat_features(prompt.messages), last_user_text(prompt.messages))
        fields = replace(fields, features=features, charged_tokens=charged)
        return await self._generate_job(fields, generator, token_ids, max_tokens, sampling, prompt)

    async def completion(
        self,
        origin: RequestOrigin,
        model: str,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None,
        sampling: Sampling,
        default_max_tokens: int | None = None,
        prompts: int = 1,
        characters: int = 0,
    ) -> GenerateJob:
        """The job of one of the `prompts` in a body, a text or token ids. Raises Refused, Rejected.

        If the texts of the body have together so many `characters` that they are long, each is charged
        before it is tokenized.

        Without `max_tokens` the limit is `default_max_tokens`, the model's default or what fits the context.
        """
        generator = self._generator(model)
        fields = self._requests.fields(origin, _adapter(model, generator))
        charged, features = None, None
        token_ids: Sequence[int]
        if isinstance(prompt, str):
            text_limit(generator).check(len(prompt), param="prompt")
            token_ids, charged = await self._tokenizer.tokenize(
                max(characters, len(prompt)),
                partial(generator.tokenize, prompt),
                partial(generate_job_to_charge, self._requests, fields, generator, len(prompt), sampling),
            )
            token_ids = array("I", token_ids)
            if self._keeps_features:
                features = self._with_vector(prompt_features(prompt), prompt)
        else:
            token_ids = prompt
        fields = replace(fields, features=features, charged_tokens=charged)
        return await self._generate_job(
            fields,
            generator,
            token_ids,
            max_tokens,
            sampling,
            None,
            default_max_tokens=default_max_tokens,
            prompts=prompts,
        )

    async def embeddings(
        self,
        origin: RequestOrigin,
        model: str | None,
        inputs: Sequence[str] | Sequence[Sequence[int]],
        *,
        truncation: TruncationRequest | None = None,
        prompt: str | None = None,
        takes_any_ids: bool = False,
    ) -> EmbedJob:
        """The job of the inputs, tokenized and truncated. Raises Refused, Rejected.

        Without a `model` it is the only one. Without `truncation` an input that exceeds its limit is refused.
        `prompt` is the name of the prompt that the model puts before texts; token ids are used unchanged, and
        refused without the special tokens of the model's tokenizer unless the request `takes_any_ids`.
        """
        embedder = named_backend(self._encoders.embedders, model, "embeddings", others=self._served)
        fields = self._requests.fields(origin)
        with self._encoders.bound(embedder):
            return await self._embed_job(
                fields, embedder, inputs, truncation, prompt, takes_any_ids=takes_any_ids
            )

    async def _embed_job(
        self,
        fields: RequestFields,
        embedder: Embedder,
        inputs: Sequence[str] | Sequence[Sequence[int]],
        truncation: TruncationRequest | None,
        prompt: str | None,
        *,
        takes_any_ids: bool,
    ) -> EmbedJob:
        texts = [text for text in inputs if isinstance(text, str)]
        given = [ids for ids in inputs if not isinstance(ids, str)]
        if given and prompt is not None:
            raise Refused(
                f"prompt_name={prompt!r}: a prompt is put before texts, and these inputs are token ids; send "
                "texts, or add the prompt's token ids to the inputs",
                param="prompt_name",
            )
        if not takes_any_ids:
            require_special_tokens(given, embedder)
        limit = None if truncation is None else truncation_limit(truncation, embedder)
        charged = None
        token_ids: Sequence[Sequence[int]] = given
        if texts:
            bounded = bounded_texts(texts, embedder, limit)
            prefix = embedder.prompts.get(prompt or "", "")
            token_ids, charged = await self._tokenizer.tokenize(
                sum(map(len, bounded)) + len(prefix) * len(bounded),
                partial(embedder.tokenize, bounded, prompt=prompt),
                partial(embed_job_to_charge, self._requests, fields, embedder, bounded),
            )
        if truncation is not None and limit is not None:
            token_ids = [embedder.truncate(ids, limit, truncation.side) for ids in token_ids]
        _check_inputs(token_ids, embedder, are_given=bool(given))
        tokens = sum(map(len, token_ids))
        request = self._requests.build(fields, Kind.EMBED, embedder.model, tokens, 0, len(token_ids))
        is_plain = prompt is None and truncation in (None, MODEL_LIMIT)
        return EmbedJob(request, embedder, token_ids, texts if is_plain else (), charged)

    def remember_vectors(self, job: EmbedJob, vectors: Vectors) -> None:
        """Keeps the vectors of plain texts for the length forecasts of later prompts."""
        if self._prompt_vectors is None or not job.texts:
            return
        with self._fail_open[Subject.PROMPT_VECTORS]:
            self._prompt_vectors.store(job.request.model, job.texts, vectors)

    def _with_vector(self, features: PromptFeatures, text: str) -> PromptFeatures:
        """`features` with the vector of `text` if that was embedded before."""
        return features if self._prompt_vectors is None else self._prompt_vectors.with_vector(features, text)

    async def _generate_job(
        self,
        fields: RequestFields,
        generator: Generator,
        prompt: Sequence[int],
        max_tokens: int | None,
        sampling: Sampling,
        chat: ChatPrompt | None,
        *,
        default_max_tokens: int | None = None,
        prompts: int = 1,
    ) -> GenerateJob:
        room = generator.max_model_tokens - len(prompt)
        required = 1 if max_tokens is None else max_tokens
        if not prompt:
            raise Refused("the prompt has no tokens; send at least one", param="prompt")
        if required > room:
            cause = "leaves no room for output" if max_tokens is None else f"max_tokens is {required:,}"
            raise Refused(
                f"{generator.model} has a context of {generator.max_model_tokens:,} tokens; the prompt has "
                f"{len(prompt):,} and {cause}. Shorten the prompt or lower max_tokens.",
                param="messages" if chat else "prompt",
                code="context_length_exceeded",
            )
        check_prompt_logprobs(sampling, len(prompt), generator)
        defaults = generator.sampling_defaults or SamplingDefaults()
        unstated = min(room, default_max_tokens or defaults.max_tokens or room)
        limit = unstated if max_tokens is None else max_tokens
        limit = min(limit, defaults.max_tokens_limit or limit)
        most = self._requests.terms_of(fields.origin.caller).max_answer_values
        is_stated = max_tokens is not None
        limit = answer_limit(limit, sampling, len(prompt), prompts, most, is_stated=is_stated)
        request = self._requests.build(fields, Kind.GENERATE, generator.model, len(prompt), limit, sampling.n)
        if sampling.logprobs is not None:
            echoes = sampling.prompt_logprobs is not None
            request = replace(request, values_per_token=1 + sampling.logprobs, echoes_values=echoes)
        can_stop = sampling.stop or sampling.stop_token_ids or sampling.structure is not None
        if sampling.ignore_eos and not can_stop:
            request = replace(request, runs_to_limit=True)
        sampling = defaults.filled(sampling, max_tokens=limit)
        job = GenerateJob(request, prompt, sampling, chat, fields.charged_tokens)
        return await self._grammars.checked(job, generator)

    def _generator(self, model: str) -> Generator:
        return named_backend(self._generators, model, "chat and completions", others=self._served)


def intake_of(
    config: Config,
    clock: Clock,
    generators: Mapping[str, Generator],
    encoders: EncoderRegistry,
    fail_open: FailOpen,
    charge: Callable[[GenerateJob | EmbedJob], None],
    predictor: LengthPredictor,
) -> Intake:
    """The intake that a configuration describes; `charge` charges a job before it is tokenized."""
    encoder, chat = config.predictors.encoder, config.models.chat
    adapters: dict[str, Generator] = {}
    if chat is not None and chat.lora_modules:
        adapters = dict.fromkeys(chat.lora_modules, generators[chat.served_name])
    return Intake(
        clock,
        {**generators, **adapters},
        encoders,
        terms_of(config),
        fail_open=fail_open,
        charge=charge,
        limits=config.server.limits,
        keeps_features=isinstance(predictor, LearnedLengths),
        prompt_vectors=PromptVectorCache(encoder) if encoder else None,
    )


def _adapter(model: str, generator: Generator) -> str | None:
    """The LoRA adapter that a client names as its model; None for the model itself."""
    return None if model == generator.model else model


def make_ticket(
    job: GenerateJob | EmbedJob,
    generators: Mapping[str, Generator],
    lengths: GuardedLengthPredictor,
) -> Ticket:
    """The ticket of a job before any decision, with its footprint and length forecast."""
    request = job.request
    forecast: LengthForecast | None = None
    lengths_in: Sequence[int] = ()
    if isinstance(job, EmbedJob):
        lengths_in = [len(ids) for ids in job.inputs]
        size = job.embedder.batch_bytes(lengths_in)
        # Half of the bytes, so that calls for two batches are admitted: the worker holds the second one
        # without device memory while it computes the first.
        footprint = Footprint(base=-(-size // 2), steps=max(1, request.prompt_tokens), worst=size)
    else:
        forecast = lengths.forecast(request)
        footprint = generate_footprint(
            generators[request.model].geometry,
            prompt_tokens=request.prompt_tokens,
            max_output_tokens=request.max_output_tokens,
            expected_tokens=forecast.mean,
            sequences=request.sequences,
        )
    timeline = Timeline(request.arrival)
    return Ticket(
        request,
        footprint,
        forecast,
        timeline,
        charged_tokens=job.charged_tokens,
        input_lengths=lengths_in,
        embedder=job.embedder if isinstance(job, EmbedJob) else None,
    )


def _check_inputs(inputs: Sequence[Sequence[int]], embedder: Embedder, *, are_given: bool) -> None:
    """Raises Refused for an input that the model does not accept; `are_given`: the client sent the ids."""
    for position, ids in enumerate(inputs):
        if not ids:
            raise Refused(
                f"input[{position}] has no tokens for {embedder.model}; leave it out",
                param="input",
            )
        if len(ids) > embedder.max_input_tokens:
            raise Refused(
                f"input[{position}] has {len(ids):,} tokens; {embedder.model} accepts at most "
                f"{embedder.max_input_tokens:,}. Split it, shorten it, or set truncate_prompt_tokens.",
                param="input",
                code="context_length_exceeded",
            )
        if are_given and max(ids) >= embedder.vocabulary:
            raise Refused(
                f"input[{position}] has token id {max(ids)}; the highest of {embedder.model} is "
                f"{embedder.vocabulary - 1:,}. Use the model's own tokenizer.",
                param="input",
            )
