"""Checks grammars before the engine sees them: bounds of their text, then a compilation within limits.

A grammar that the engine has compiled costs nothing more, and one that was refused is refused again at once.
"""

import asyncio
import json
import logging
import signal
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from backends.vllm.grammar_compiler import Reply
from backends.vllm.grammar_limits import KINDS, GrammarLimits, GrammarText
from backends.vllm.grammar_process import GrammarProcess
from controlplane.core.errors import BackendFailed, Refused
from controlplane.core.ports import InTurn

if TYPE_CHECKING:
    from vllm.sampling_params import StructuredOutputsParams

log = logging.getLogger(__name__)

Value = TypeVar("Value")

# Per tenant. Grammars that the engine has compiled are bounded by the bytes of their text, those that it may
# still have to compile by the processor seconds that this takes.
_COMPILED_BYTES = 16 << 20
_PENDING_SECONDS = 5.0
_REFUSALS = 1_024


@dataclass(eq=False, slots=True)
class RecentValues(Generic[Value]):
    """Cache of at most `capacity` weight in total; the least recently used values are dropped."""

    capacity: float
    _values: OrderedDict[bytes, tuple[Value, float]] = field(default_factory=OrderedDict)
    _weight: float = 0.0

    def get(self, key: bytes) -> Value | None:
        """The value of `key`, which becomes the most recently used; None if there is none."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key][0]

    def put(self, key: bytes, value: Value, weight: float) -> None:
        """Adds a value and drops the least recently used; it is kept even if it alone is too heavy."""
        self.pop(key)
        self._values[key] = (value, weight)
        self._weight += weight
        while self._weight > self.capacity and len(self._values) > 1:
            self.pop(next(iter(self._values)))

    def pop(self, key: bytes) -> Value | None:
        """Removes the value of `key` and returns it; None if there is none."""
        if key not in self._values:
            return None
        value, weight = self._values.pop(key)
        # Sums of floats drift.
        self._weight = self._weight - weight if self._values else 0.0
        return value


@dataclass(eq=False, slots=True)
class _TenantGrammars:
    """Validated grammars that the engine has yet to compile, those that it has compiled, and refusals."""

    pending: RecentValues[Mapping[str, Any]] = field(default_factory=lambda: RecentValues(_PENDING_SECONDS))
    compiled: RecentValues[Mapping[str, Any]] = field(default_factory=lambda: RecentValues(_COMPILED_BYTES))
    refused: RecentValues[Refused] = field(default_factory=lambda: RecentValues(_REFUSALS))


@dataclass(frozen=True, slots=True)
class CheckedGrammar:
    """A grammar that the engine may compile: its key, and its fields after vLLM's validation."""

    key: bytes
    validated: Mapping[str, Any]


class GrammarChecker:
    """Checks the grammars of one engine."""

    def __init__(self, limits: GrammarLimits) -> None:
        self._limits = limits
        self._process = GrammarProcess(limits)
        self._tenants: defaultdict[str, _TenantGrammars] = defaultdict(_TenantGrammars)

    def start(self) -> None:
        """Begins to load the compilers, while an engine starts."""
        # A new engine has compiled nothing.
        self._tenants.clear()
        if self._limits.grammar_ms:
            self._process.start()

    async def engine_started(self, config: Any) -> None:
        """Returns once grammars for the engine with this VllmConfig can be compiled.

        If they cannot, that is logged, and each check tries again.
        """
        if self._limits.grammar_ms:
            self._process.configure(config)
            try:
                await self._process.ready()
            except BackendFailed as error:
                log.error("structured outputs fail: %s", error)

    async def stop(self) -> None:
        """Ends the process that compiles."""
        await self._process.stop()

    async def check(
        self, grammar: "StructuredOutputsParams", *, is_of_tools: bool, tenant: str, in_turn: InTurn
    ) -> None:
        """Raises Refused for a grammar that costs too much, and what `GrammarProcess.compile` raises.

        The text of a grammar that is not known is checked, and compiled, `in_turn`.
        """
        stated = vars(grammar)
        kind = next((name for name in KINDS if stated.get(name) is not None), None)
        if kind is None:
            return
        text = GrammarText(kind, stated[kind], is_of_tools)
        text.check_size(self._limits)
        if not self._limits.grammar_ms:
            text.check_content(self._limits)
            return
        key, grammars = grammar_key(stated), self._tenants[tenant]

        async def compile_unless_known() -> None:
            # Another request may have had the same grammar compiled meanwhile.
            if not self._is_known(grammars, key):
                # Its text may have 99,000 objects.
                await asyncio.to_thread(text.check_content, self._limits)
                reply = await self._process.compile(stated)
                if reply == {"signal": signal.SIGKILL}:
                    raise BackendFailed("a grammar's compiler was killed, perhaps for lack of memory")
                self._keep(text, key, grammars, reply)

        if not self._is_known(grammars, key):
            await in_turn(compile_unless_known)
        if (refusal := grammars.refused.get(key)) is not None:
            raise Refused(str(refusal), param=text.param, code=refusal.code)

    def find(self, grammar: "StructuredOutputsParams") -> CheckedGrammar | None:
        """The grammar as it was checked; None if it was not, or is forgotten."""
        key = grammar_key(vars(grammar))
        found = self._find(key)
        return None if found is None else CheckedGrammar(key, found)

    def engine_compiled(self, checked: CheckedGrammar) -> None:
        """Notes that the engine has compiled a grammar: it generated a token."""
        for grammars in self._tenants.values():
            if grammars.pending.pop(checked.key) is not None:
                grammars.compiled.put(checked.key, checked.validated, len(json.dumps(checked.validated)))

    def _is_known(self, grammars: _TenantGrammars, key: bytes) -> bool:
        return grammars.refused.get(key) is not None or self._find(key) is not None

    def _find(self, key: bytes) -> Mapping[str, Any] | None:
        """A grammar that any tenant had compiled."""
        for each in self._tenants.values():
            if (found := each.compiled.get(key) or each.pending.get(key)) is not None:
                return found
        return None

    def _keep(self, text: GrammarText, key: bytes, grammars: _TenantGrammars, reply: Reply) -> None:
        refusal = _refusal(text, reply, self._limits)
        if refusal is None:
            grammars.pending.put(key, reply["grammar"], reply["seconds"])
        else:
            grammars.refused.put(key, refusal, 1)


def grammar_key(stated: Mapping[str, Any]) -> bytes:
    """A digest of a grammar's fields."""
    return blake2b(json.dumps(stated).encode(), digest_size=16).digest()


def _refusal(text: GrammarText, reply: Reply, limits: GrammarLimits) -> Refused | None:
    match reply:
        case {"refused": reason}:
            return Refused(f"{text.name} does not compile: {reason}", param=text.param)
        case {"signal": signal.SIGPROF | signal.SIGALRM}:
            cause = "takes longer to compile than that of a model's output may"
            return text.refused(cause, "grammar_ms", f"{limits.grammar_ms:,} (of processor time)")
        case {"signal": signal.SIGVTALRM} | {"is_slow": True}:
            cause = "takes longer for one token than the engine may"
            return text.refused(cause, "grammar_step_ms", f"{limits.grammar_step_ms:,} (of processor time)")
        case {"signal": _}:
            cause = "takes more memory to compile than that of a model's output may"
            return text.refused(cause, "grammar_memory", f"{limits.grammar_memory >> 20:,} MiB")
    return None
