"""Protocols of backends and predictors, and the messages that they exchange with the control plane.

A backend owns its engine. It gets token ids, so every prompt is tokenized once, at the gate.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from controlplane.core.clock import NO_TIME, Duration, Instant
from controlplane.core.engine_reports import DeviceSharing, EngineState, EngineStep, StepCost
from controlplane.core.forecast import LengthForecast
from controlplane.core.generation import (
    FIRST_HANDOFF,
    ChatPrompt,
    Delta,
    Handoff,
    ImageLimits,
    RenderedImages,
    Sampling,
    SamplingDefaults,
)
from controlplane.core.kv_geometry import KvGeometry
from controlplane.core.request import Request

Vectors = npt.NDArray[np.float32]
TruncationSide = Literal["left", "right"]
InTurn = Callable[[Callable[[], Awaitable[None]]], Awaitable[None]]
"""Runs costly work when it is the turn of the tenant that it is for."""


class TextCodec(Protocol):
    """Turns texts into the token ids of one model and back; safe to call in threads.

    Ids are below `vocabulary`.
    """

    @property
    def vocabulary(self) -> int:
        """Exclusive upper bound of token ids."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text of any length."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids below `vocabulary`, special tokens included."""

    def strings(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's own string of each token."""


class ImageRenderer(Protocol):
    """Renders conversations with images for one model."""

    async def render(self, prompt: ChatPrompt, limits: ImageLimits) -> RenderedImages:
        """Token ids of a conversation; its images are decoded and processed off the event loop.

        Raises Refused for images beyond the limits, and for those that are broken or not accepted.
        """


class Generator(Protocol):
    """An LLM engine.

    `start` returns when the engine generates; `stop` may be called at any time, and `start` again after it.
    A new start keeps model, sizes and `on_step`; options and quota are those of the first start. Prompts can
    be tokenized from the first start on, also while the engine is dead. `on_step` is called for each step
    that followed another. `on_down` is called with the reason as soon as the engine is known to have died,
    before its streams end; the end by `stop` is no death.

    An engine in which Tandem's scheduler runs (`has_tandem_scheduler`) defers, ranks and preempts before each
    step. Requests may wait in it, and it supports `set_quota`, `set_options` and `set_device_contention`. Any
    other refuses the first two.

    With `has_prefix_cache` requests share the blocks of equal prefixes, and find those of earlier requests.

    `step_cost` is the expected cost of its steps from the figures of device and model, before any
    measurement; None if unknown.
    """

    model: str
    on_step: Callable[[EngineStep], None] | None
    on_down: Callable[[str], None] | None
    has_tandem_scheduler: bool
    has_prefix_cache: bool
    geometry: KvGeometry
    kv_bytes: int
    max_model_tokens: int
    max_token_characters: int
    """Most characters that one token covers."""
    max_running: int
    max_prompt_logprobs: int
    """Most tokens of a prompt whose log probabilities fit into the memory that its start measured; 0 if it
    cannot bound them."""
    step_cost: StepCost | None

    @property
    def sampling_defaults(self) -> SamplingDefaults | None:
        """The model's defaults that the gate applies; None if it has none."""

    @property
    def images(self) -> ImageRenderer | None:
        """Renders conversations with images; None if the model takes none."""

    @property
    def codec(self) -> TextCodec:
        """The tokenizer. Raises BackendDown before the first start."""

    @property
    def stall_count(self) -> int:
        """Times the watchdog killed a live but unresponsive engine."""

    async def start(self) -> None:
        """Returns once the engine generates. Raises BackendDown."""

    async def stop(self) -> None:
        """Stops the engine; running requests end with BackendDown."""

    async def check(self) -> None:
        """Raises BackendDown unless the engine responds."""

    async def render_chat(self, prompt: ChatPrompt) -> list[int]:
        """Token ids of the conversation under the model's template.

        Raises Refused, also for a text that cannot fit, before it is tokenized.
        """

    async def tokenize(self, text: str) -> list[int]:
        """Token ids of `text`. May raise Refused instead of tokenizing a text that cannot fit."""

    async def check_grammar(
        self, sampling: Sampling, chat: ChatPrompt | None, *, tenant: str, in_turn: InTurn
    ) -> None:
        """Raises Refused if the structured output, or the calls that `chat` demands, cost too much.

        Called before `generate`. Work of more than milliseconds is done `in_turn`, off the event loop.
        """

    def generate(
        self,
        request: Request,
        prompt: Sequence[int],
        sampling: Sampling,
        chat: ChatPrompt | None = None,
        *,
        handoff: Handoff = FIRST_HANDOFF,
    ) -> AsyncGenerator[Delta]:
        """Deltas in order; closing the generator aborts the request in the engine.

        If the engine queues and preempts without Tandem's scheduler, the smaller rank goes first and is
        preempted last. `chat` is given for conversations, so that reasoning and tool calls can be parsed out
        of the text. `request.adapter` names one of the adapters in `models.chat.lora_modules`. Raises Refused
        for what this engine cannot do, BackendDown, BackendFailed.
        """

    async def preempt(self, request_id: str) -> None:
        """Returns when the request's blocks are free.

        Its generator then ends with a delta whose finish_reason is "preempted", unless the output was
        complete.
        """

    async def set_quota(self, quota_bytes: int, *, use_ceiling_bytes: int | None = None) -> None:
        """Limits the use of the KV cache, in whole blocks, from the next step on.

        No request starts or resumes that would bring use above `quota_bytes`. Running requests may grow to
        `use_ceiling_bytes` (None: the quota); use beyond it is preempted. Raises Refused unless one block <=
        quota <= use ceiling <= cache.
        """

    async def set_options(self, changes: Mapping[str, Any]) -> None:
        """Changes the policy or its parameters, by the names of `scheduling.engine`. Raises Refused."""

    def set_forecast(self, request_id: str, forecast: LengthForecast) -> None:
        """Replaces the forecast of the total output; takes effect soon.

        Ignored for a finished request, and by an engine without Tandem's scheduler.
        """

    def set_device_contention(self, *, is_shared: bool) -> None:
        """Signals to the engine whether an embedding pass is under way on the device.

        Tandem's scheduler then delays its next step to the end of the pass, as far as its TPOT objectives
        allow; any other ignores it.
        """

    def state(self) -> EngineState:
        """Latest state of the engine. Raises BackendDown."""


@dataclass(frozen=True, slots=True)
class EmbeddingPass:
    """One forward pass of an embedding model, as the server saw it.

    `handover` is the time for which a free lane was not computing between the decision to start the pass and
    the receipt of its result. `requests` are the ids of the requests that it computed for. `priced` is the
    predicted time by which its cost was weighed; None if it had none.
    """

    inputs: int
    tokens: int
    padded_tokens: int
    elapsed: Duration
    handover: Duration = NO_TIME
    requests: Collection[str] = ()
    priced: Duration | None = None


PauseCost = Callable[[Sequence[float]], Sequence[float]]
"""Expected number of SLOs of running generations, weighted by class, that each of some passes breaks.

Passes are by their time in seconds, ascending."""


class Embedder(Protocol):
    """An embedding engine in a process of its own, for one model.

    Its properties are known once `start` returned. `on_pass` is called after every pass, and `on_computing`
    when passes begin to be under way (True) and when none is any more (False). `pause_cost` is asked before
    each pass what it costs the generations that run (None: none runs).
    """

    model: str
    max_running: int
    max_token_characters: int
    """Most characters that one token covers; if the tokenizer drops some, the most that are served."""
    on_pass: Callable[[EmbeddingPass], None] | None
    on_computing: Callable[[bool], None] | None
    pause_cost: Callable[[], PauseCost | None] | None
    allocator_bytes: int
    """Device bytes reserved by its allocator after the last pass; 0 if unknown."""

    @property
    def sharing(self) -> DeviceSharing:
        """How its passes share the device with the steps of the LLM."""

    @property
    def stall_count(self) -> int:
        """Times the watchdog killed a live but unresponsive engine."""

    @property
    def down(self) -> str | None:
        """Why it computes nothing, for example while its process is replaced; None while it computes."""

    @property
    def restarts(self) -> int:
        """Number of restarts of its process, failed ones included."""

    @property
    def out_of_memory(self) -> int:
        """Number of passes that ran out of device memory."""

    @property
    def is_computing(self) -> bool:
        """Whether a pass is in flight."""

    def tokens_left(self, request_id: str) -> int | None:
        """Tokens of a call not computed yet, a pass in flight included; None for an unknown call."""

    @property
    def dimension(self) -> int:
        """Length of its vectors."""

    @property
    def supported_dimensions(self) -> Sequence[int]:
        """Vector lengths that may be requested; several for Matryoshka models."""

    @property
    def max_input_tokens(self) -> int:
        """Longest input in tokens, special tokens included."""

    @property
    def vocabulary(self) -> int:
        """Exclusive upper bound of token ids."""

    @property
    def special_tokens(self) -> tuple[Sequence[int], Sequence[int]]:
        """Token ids that the tokenizer puts before and after every text."""

    @property
    def pass_tokens(self) -> int:
        """Most padded tokens of one pass."""

    @property
    def workspace_bytes(self) -> int:
        """Device bytes of the largest batches in flight at once."""

    @property
    def budget_bytes(self) -> int:
        """Device bytes that the batches in flight may take now."""

    def set_budget_bytes(self, budget_bytes: int) -> None:
        """Replaces `budget_bytes` from the next batch on.

        An input that alone needs more is still computed, alone: the caller rejects such inputs.
        """

    @property
    def prompts(self) -> Mapping[str, str]:
        """Prefixes that the model was trained with, by name ("query", "passage")."""

    async def start(self) -> None:
        """Returns once the engine computes. Raises BackendDown."""

    async def stop(self) -> None:
        """Stops the engine."""

    async def check(self) -> None:
        """Raises BackendDown unless the engine responds."""

    async def tokenize(self, texts: Sequence[str], *, prompt: str | None = None) -> Sequence[Sequence[int]]:
        """Token ids of each text with the model's special tokens, never truncated.

        `prompt` names one of `prompts`; None is the model's default. Raises Refused for an unknown name.
        """

    def truncate(
        self, token_ids: Sequence[int], limit: int, side: TruncationSide | None = None
    ) -> Sequence[int]:
        """At most `limit` tokens of one text, special tokens included.

        `side` is cut, left being the start of the text; None is the side that the model's tokenizer cuts.
        Raises Refused if no token of the text would be left.
        """

    def batch_time(self, token_counts: Sequence[int]) -> Duration | None:
        """Time of a pass over these inputs on an idle device; None if unknown."""

    def batch_bytes(self, token_counts: Sequence[int]) -> int:
        """Device bytes of a pass over these inputs, split into the largest batches."""

    async def embed(
        self, request: Request, inputs: Sequence[Sequence[int]], *, deadline: Instant | None
    ) -> Vectors:
        """float32 [inputs, dimension], row i for input i. Cancelling skips inputs that have not started."""


class Reranker(Embedder, Protocol):
    """An embedder whose inputs are pairs of a query and a document.

    Its rows are float32 [pairs, 2]: the score, and the logit that the model's activation made it of. Its
    `tokenize` adds no special tokens.
    """

    def pair(
        self, query: Sequence[int], document: Sequence[int], limit: int, side: TruncationSide | None = None
    ) -> Sequence[int]:
        """One input of at most `limit` tokens, special tokens included, for `embed`.

        The longer text is cut first, at `side`; None is the side that the model's tokenizer cuts. Raises
        Refused if no token of a text would be left.
        """


class LengthPredictor(Protocol):
    """Predicts output lengths, and learns from every finished request."""

    def forecast(self, request: Request) -> LengthForecast:
        """Distribution of the request's output length."""

    def observe(self, request: Request, output_tokens: int) -> None:
        """Learns from a complete output."""

    def withdraw(self, request: Request) -> None:
        """Forgets a request that ended without a complete output."""
