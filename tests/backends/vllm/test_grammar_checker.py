"""Grammars are checked by vLLM's own compilers before the engine sees them; a known one costs nothing."""

import asyncio
import os
import signal
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import pytest_asyncio

from backends.vllm.grammar_checker import GrammarChecker, RecentValues
from backends.vllm.grammar_limits import GrammarText
from controlplane.core.errors import BackendDown, BackendFailed, Refused
from controlplane.core.generation import ChatPrompt, Sampling
from tests.backends.vllm.test_grammar_limits import LIMITS
from tests.engines import complete, running_vllm, text_of

NUMBER = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
engine = [pytest.mark.engine, pytest.mark.untimed, pytest.mark.asyncio(loop_scope="session")]


def test_values_used_first_are_dropped():
    values: RecentValues[str] = RecentValues(3.0)
    for name in "abc":
        values.put(name.encode(), name, 1.0)
    assert values.get(b"a") == "a"
    values.put(b"d", "d", 1.5)
    assert [values.get(key) for key in (b"a", b"b", b"c", b"d")] == ["a", None, None, "d"]
    values.put(b"e", "e", 9.0)
    assert [values.get(key) for key in (b"a", b"d", b"e")] == [None, None, "e"]
    assert values.pop(b"e") == "e" and values.pop(b"e") is None


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def guarded():
    """An engine whose grammars are checked, with a parser for tools."""
    async with running_vllm(tool_parser="hermes", grammars=LIMITS) as generator:
        yield generator


class Turns:
    """Counts the costly checks."""

    def __init__(self) -> None:
        self.taken = 0

    async def __call__(self, work) -> None:
        self.taken += 1
        await work()


def schema(content: object) -> Sampling:
    return Sampling(max_tokens=60, temperature=0.0, structure={"type": "json_schema", "schema": content})


async def checked(generator, sampling: Sampling, chat: ChatPrompt | None = None, turns=None) -> int:
    """How many costly checks there were."""
    turns = turns or Turns()
    await generator.check_grammar(sampling, chat, tenant="red", in_turn=turns)
    return turns.taken


async def test_a_text_is_checked_in_turn_and_not_on_the_event_loop(monkeypatch):
    """That of a schema of 99,000 objects takes longer than other requests may wait for the event loop."""
    threads = []

    def refuse(text, limits) -> None:
        threads.append(threading.current_thread())
        raise Refused("too complex", param=text.param)

    monkeypatch.setattr(GrammarText, "check_content", refuse)
    turns, grammar = Turns(), SimpleNamespace(json="{}")
    with pytest.raises(Refused, match="too complex"):
        await GrammarChecker(LIMITS).check(grammar, is_of_tools=False, tenant="red", in_turn=turns)
    (thread,) = threads
    assert turns.taken == 1 and thread is not threading.main_thread()


class TestOnARealEngine:
    pytestmark = engine

    @pytest.mark.parametrize(
        ("structure", "allowed"),
        [
            ({"type": "choice", "value": ["left", "right"]}, ["left", "right"]),
            ({"type": "regex", "value": "[ab]{3}"}, None),
            ({"type": "grammar", "value": 'root ::= "yes" | "no"'}, ["yes", "no"]),
        ],
    )
    async def test_output_of_a_checked_grammar_conforms(self, guarded, structure, allowed):
        sampling = Sampling(max_tokens=8, temperature=0.0, structure=structure)
        assert await checked(guarded, sampling) == 1
        found = text_of(await complete(guarded, "Say", sampling))
        assert found in allowed if allowed else len(found) == 3 and set(found) <= set("ab")
        assert await checked(guarded, sampling) == 0

    async def test_a_known_grammar_is_neither_compiled_nor_validated_again(self, guarded, monkeypatch):
        from vllm.v1.structured_output import backend_xgrammar

        sampling = schema(NUMBER)
        assert await checked(guarded, sampling) == 1
        monkeypatch.setattr(backend_xgrammar, "validate_xgrammar_grammar", lambda _: pytest.fail("validated"))
        monkeypatch.setattr(GrammarText, "check_content", lambda *_: pytest.fail("its text was checked"))
        for _ in range(2):
            found = text_of(await complete(guarded, "Say", sampling))
            assert found.startswith('{"number":')
            assert await checked(guarded, sampling) == 0

    @pytest.mark.parametrize(
        ("structure", "message", "param"),
        [
            ({"type": "json_schema", "schema": {"type": "odd"}}, "Unsupported type", "response_format"),
            ({"type": "regex", "value": "("}, "does not compile", "structured_outputs.regex"),
            ({"type": "regex", "value": "a" * 200_000}, "limits.max_grammar", "structured_outputs.regex"),
            ({"type": "grammar", "value": "root :="}, "does not compile", "structured_outputs.grammar"),
        ],
    )  # fmt: skip
    async def test_a_refusal_is_repeated_without_work(self, guarded, structure, message, param):
        turns = Turns()
        for _ in range(2):
            with pytest.raises(Refused, match=message) as refused:
                await checked(guarded, Sampling(max_tokens=4, structure=structure), turns=turns)
            assert refused.value.param == param
        assert turns.taken == (message != "limits.max_grammar")

    async def test_a_grammar_that_takes_too_long_is_refused_and_the_engine_never_sees_it(self, guarded):
        checker = GrammarChecker(replace(LIMITS, grammar_ms=100))
        checker.start()
        await checker.engine_started(guarded._engine.config)
        try:
            from vllm.sampling_params import StructuredOutputsParams

            costly = {f"p{at}": {"type": "string"} for at in range(1_000)}
            grammar = StructuredOutputsParams(json={"type": "object", "properties": costly})
            turns = Turns()
            for _ in range(2):
                with pytest.raises(Refused, match=r"server\.limits\.grammar_ms is 100") as refused:
                    await checker.check(grammar, is_of_tools=False, tenant="red", in_turn=turns)
            assert (refused.value.code, turns.taken) == ("grammar_too_complex", 1)
            assert checker.find(grammar) is None
            simple = StructuredOutputsParams(json=NUMBER)
            await checker.check(simple, is_of_tools=False, tenant="red", in_turn=turns)
            assert checker.find(simple) is not None
        finally:
            await checker.stop()

    async def test_a_killed_compiler_says_nothing_about_its_grammar(self, guarded, monkeypatch):
        from vllm.sampling_params import StructuredOutputsParams

        checker, replies = GrammarChecker(LIMITS), [{"signal": signal.SIGKILL}]
        checker.start()
        await checker.engine_started(guarded._engine.config)
        compiled = checker._process.compile

        async def compile_once_killed(stated):
            return replies.pop() if replies else await compiled(stated)

        try:
            monkeypatch.setattr(checker._process, "compile", compile_once_killed)
            grammar = StructuredOutputsParams(json=NUMBER)
            with pytest.raises(BackendFailed, match="compiler was killed"):
                await checker.check(grammar, is_of_tools=False, tenant="red", in_turn=Turns())
            await checker.check(grammar, is_of_tools=False, tenant="red", in_turn=Turns())
            assert checker.find(grammar) is not None
        finally:
            await checker.stop()

    async def test_calls_are_checked_as_far_as_they_are_constrained(self, guarded):
        def offering(properties: int, choice: object, *, strict: bool = False) -> ChatPrompt:
            parameters = {
                "type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(properties)},
            }  # fmt: skip
            function = {"name": "call", "parameters": parameters, "strict": strict}
            tool = {"type": "function", "function": function}
            return ChatPrompt([{"role": "user", "content": "hi"}], tools=[tool], tool_choice=choice)

        named = {"type": "function", "function": {"name": "call"}}
        plain = Sampling(max_tokens=4)
        # Without `strict` the arguments are free.
        assert await checked(guarded, plain, offering(2_000, "auto")) == 0
        assert await checked(guarded, plain, offering(2, "required", strict=True)) == 1
        assert await checked(guarded, plain, offering(2, "required", strict=True)) == 0
        for choice in ("auto", "required", named):
            with pytest.raises(Refused, match="the grammar of the tools has 2,000 properties") as refused:
                await checked(guarded, plain, offering(2_000, choice, strict=True))
            assert refused.value.param == "tools"

    async def test_one_compilation_serves_all_that_wait_for_it(self, guarded):
        sampling = schema({**NUMBER, "title": "shared"})
        compiled = 0
        compile_once = guarded._grammars._process.compile

        async def counted(stated):
            nonlocal compiled
            compiled += 1
            return await compile_once(stated)

        class OneAtATime(Turns):
            lock = asyncio.Lock()

            async def __call__(self, work) -> None:
                self.taken += 1
                async with self.lock:
                    await work()

        one_at_a_time = OneAtATime()
        guarded._grammars._process.compile = counted
        try:
            await asyncio.gather(*(checked(guarded, sampling, turns=one_at_a_time) for _ in range(5)))
        finally:
            guarded._grammars._process.compile = compile_once
        assert (one_at_a_time.taken, compiled) == (5, 1)

    async def test_a_rejection_by_the_gate_is_passed_on(self, guarded):
        """Its tenant's rate limit is charged when a grammar has to be compiled; that is no failure."""

        class RateLimited(Exception):
            pass

        async def reject(_) -> None:
            raise RateLimited

        sampling = schema({**NUMBER, "title": "never compiled"})
        with pytest.raises(RateLimited):
            await guarded.check_grammar(sampling, None, tenant="red", in_turn=reject)

    async def test_a_killed_process_is_started_again(self, guarded):
        process = guarded._grammars._process._process
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert await checked(guarded, schema({**NUMBER, "title": "after the restart"})) == 1
        assert guarded._grammars._process._process is not process

    async def test_without_an_engine_it_is_down(self):
        checker = GrammarChecker(LIMITS)
        from vllm.sampling_params import StructuredOutputsParams

        with pytest.raises(BackendDown):
            await checker.check(
                StructuredOutputsParams(json=NUMBER), is_of_tools=False, tenant="red", in_turn=Turns()
            )
