"""What does the control plane need from the outside? Backends, predictors and their messages.

A backend owns its engine. It is given token ids, so every prompt is tokenised once, at the gate.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from controlplane.core.clock import NO_TIME, Duration, Instant
from controlplane.core.forecast import LengthForecast
from controlplane.core.generation import FIRST_HANDOFF, ChatPrompt, Delta, Handoff, Sampling
from controlplane.core.geometry import KvGeometry
from controlplane.core.request import Request
from controlplane.core.view import Pace

Vectors = npt.NDArray[np.float32]
TruncationSide = Literal["left", "right"]


@dataclass(frozen=True, slots=True)
class EngineState:
    """Read back from the engine; memory in bytes of KV blocks. `ceded_bytes` of the cache nobody in the
    engine holds or still writes: only they may be lent. `held_bytes` is what each running request
    holds, by id: None from engines that do not say; one that is missing waits inside. `recompute_tokens`
    is what preemption has taken out of the cache since the start, to be computed once more where no
    prefix cache still has it; None where that is not known. `waited` is the time that the engine has left to
    others on purpose, also since its start."""

    used_bytes: int
    total_bytes: int
    running: int
    waiting: int
    preemptions: int
    quota_bytes: int | None = None
    ceded_bytes: int = 0
    held_bytes: Mapping[str, int] | None = None
    pace: Pace | None = None
    recompute_tokens: int | None = None
    waited: Duration = NO_TIME


@dataclass(frozen=True, slots=True)
class EngineStep:
    """What one step of an LLM engine did, and the time since the step before it; `waited` of that it left to
    others on purpose."""

    prefill_tokens: int
    decodes: int
    cells: int
    took: Duration
    waited: Duration = NO_TIME


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds: of any step, and more for each decoding sequence, KV cell and prompt token."""

    step: float
    decode: float
    cell: float
    prompt_token: float


class Generator(Protocol):
    """An LLM engine. `start` returns when it really answers; `stop` may be called at any time. `on_step`
    hears of each step that followed another.

    One that `orders` by itself holds back, ranks and preempts before each of its steps; then requests may
    wait in it, and it takes the three `set_…`. Any other refuses `set_quota` and `set_options`.

    `step_cost` is what its steps should take by the figures of device and model, before any was measured;
    None where nobody knows.
    """

    model: str
    on_step: Callable[[EngineStep], None] | None
    orders: bool
    geometry: KvGeometry
    kv_bytes: int
    max_model_tokens: int
    max_running: int
    step_cost: StepCost | None

    @property
    def stall_count(self) -> int:
        """How often it was taken for dead though it lived, and killed, because it left its work undone."""
        ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def check(self) -> None:
        """Raises BackendDown unless the engine answers."""

    async def render_chat(self, prompt: ChatPrompt) -> list[int]:
        """Token ids of the conversation under the model's template. Raises Refused."""
        ...

    async def tokenize(self, text: str) -> list[int]: ...

    def generate(
        self,
        request: Request,
        prompt: Sequence[int],
        sampling: Sampling,
        chat: ChatPrompt | None = None,
        *,
        standing: Handoff = FIRST_HANDOFF,
    ) -> AsyncGenerator[Delta]:
        """Deltas in order; closing the generator aborts the request in the engine.

        Where the engine queues and chooses victims, but does not order by itself, the smaller rank goes
        first and is preempted last.

        `chat` is given for conversations, so that reasoning and tool calls can be parsed out of the text.
        Raises Refused for what this engine cannot do, BackendDown, BackendFailed.
        """
        ...

    async def preempt(self, request_id: str) -> None:
        """Returns when the request's blocks are free. Its generator then ends with a delta whose
        finish_reason is "preempted", unless the answer was already complete."""

    async def set_quota(self, quota_bytes: int) -> None:
        """How much of the KV cache may be used, in whole blocks, from the engine's next step on; what is
        used beyond it is preempted. Raises Refused for less than a block and for more than all."""

    async def set_options(self, changes: Mapping[str, Any]) -> None:
        """Other policy or parameters, in the names of `scheduling.engine`. Raises Refused."""

    def set_forecast(self, request_id: str, forecast: LengthForecast) -> None:
        """The whole answer is now thought to be so long. Takes effect soon; for a request that has left,
        or an engine that does not order, not at all."""

    def set_device_contention(self, *, is_shared: bool) -> None:
        """Whether somebody else wants the device now. An engine that `orders` then goes on no faster than
        promised, so that its steps cost less; any other takes no notice."""

    def state(self) -> EngineState:
        """Raises BackendDown."""
        ...


@dataclass(frozen=True, slots=True)
class EmbeddingPass:
    """One forward pass of an embedding model, as the server saw it."""

    inputs: int
    tokens: int
    padded_tokens: int
    elapsed: Duration


class Embedder(Protocol):
    """An embedding engine in its own process, for one model. Facts are known once `start` returned;
    `on_pass` hears of every pass; `batch_limit` is asked before each how long it may take (None: as long
    as it likes). One input alone is never cut."""

    model: str
    max_running: int
    on_pass: Callable[[EmbeddingPass], None] | None
    batch_limit: Callable[[], Duration | None] | None
    allocator_bytes: int
    """Device bytes that its allocator had reserved after the last pass; 0 where nobody knows."""

    @property
    def stall_count(self) -> int:
        """How often it was taken for dead though it lived, and killed, because it left its work undone."""
        ...

    @property
    def restarts(self) -> int:
        """How often its process was started anew, or that was tried."""
        ...

    @property
    def out_of_memory(self) -> int:
        """How often a pass found none."""
        ...

    @property
    def is_computing(self) -> bool:
        """A pass is under way."""
        ...

    def tokens_left(self, request_id: str) -> int | None:
        """Of a request that it holds, those not computed yet, a pass under way among them; None for one
        that it does not hold."""

    @property
    def dimension(self) -> int: ...

    @property
    def supported_dimensions(self) -> Sequence[int]:
        """Vector lengths that may be asked for; more than one for Matryoshka models."""
        ...

    @property
    def max_input_tokens(self) -> int: ...

    @property
    def vocabulary(self) -> int:
        """All token ids are below it."""
        ...

    @property
    def workspace_bytes(self) -> int:
        """Device bytes of the largest batches that are in flight at once."""
        ...

    @property
    def budget_bytes(self) -> int:
        """Device bytes that the batches in flight may take now."""
        ...

    def set_budget_bytes(self, budget_bytes: int) -> None:
        """From the next batch on. An input that needs more alone is still computed, alone: whoever sets a
        budget below that refuses such inputs."""

    @property
    def prompts(self) -> Mapping[str, str]:
        """Texts that the model was trained to see before an input, by name ("query", "passage")."""
        ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def check(self) -> None:
        """Raises BackendDown unless the engine answers."""

    async def tokenize(self, texts: Sequence[str], *, prompt: str | None = None) -> list[list[int]]:
        """Token ids of each text with the model's special tokens, never truncated. `prompt` names one of
        `prompts`; None is the model's own default. Raises Refused for a name that it lacks."""
        ...

    def truncate(
        self, token_ids: Sequence[int], limit: int, side: TruncationSide | None = None
    ) -> Sequence[int]:
        """At most `limit` of one text's, the special tokens around it among them. `side` gives way, the left
        being the text's begin; None is the one that the model's tokenizer cuts. Raises Refused when none
        of the text would be left."""
        ...

    def batch_time(self, token_counts: Sequence[int]) -> Duration | None:
        """How long these inputs take when nothing else is asked for; None where nobody knows."""
        ...

    def batch_bytes(self, token_counts: Sequence[int]) -> int:
        """Device bytes that these inputs take while they are computed, cut to the largest batches."""
        ...

    async def embed(
        self, request: Request, inputs: Sequence[Sequence[int]], *, deadline: Instant | None
    ) -> Vectors:
        """float32 [inputs, dimension], row i for input i. Cancelling skips what has not begun."""
        ...


class LengthPredictor(Protocol):
    """How long will the answer be? Learns from every finished request."""

    def forecast(self, request: Request) -> LengthForecast: ...

    def observe(self, request: Request, output_tokens: int) -> None: ...

    def withdraw(self, request: Request) -> None:
        """It ended without a whole answer: there is nothing to learn, and nothing to keep of it."""
