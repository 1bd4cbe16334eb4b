"""Long texts: charged to their tenant before they are tokenized, in slots that tenants take in turn."""

import asyncio
import sys

import pytest

from backends.testing.scripted import ScriptedEmbedder, ScriptedGenerator
from controlplane.core.decision import Reason
from controlplane.core.errors import Refused
from controlplane.core.generation import ChatPrompt, Sampling
from controlplane.service.request_jobs import Caller, RequestOrigin
from controlplane.service.ticket import Rejected

LONG = "x" * 5_000


class SlowTokenizer(ScriptedGenerator):
    """A generator with four characters per token whose long texts are tokenized when `allowed`."""

    def __init__(self) -> None:
        super().__init__(max_model_tokens=50_000)
        self.max_token_characters = 10
        self.tokenized: list[str] = []
        self.allowed = asyncio.Event()

    async def tokenize(self, text: str) -> list[int]:
        self.tokenized.append(text[:1])
        if len(text) > 4_000:
            await self.allowed.wait()
        return [1] * -(-len(text) // 4)


def tenants(*names: str, **fields: float) -> dict[str, object]:
    return {name: {"api_keys_sha256": [f"{at:064}"], **fields} for at, name in enumerate(names)}


def complete(one, tenant: str, text: str, *, max_tokens: int = 4, **sampling: int):
    return one.service.intake.completion(
        RequestOrigin("test", Caller(tenant)), one.generator.model, text,
        max_tokens=max_tokens, sampling=Sampling(max_tokens=max_tokens, **sampling),
    )  # fmt: skip


def test_a_long_text_over_the_rate_is_rejected_before_it_is_tokenized(bench):
    async def scenario(one) -> None:
        one.generator.allowed.set()
        stream = await one.service.gate.generate(await complete(one, "red", LONG))
        async for _ in stream:
            pass
        assert one.generator.tokenized == ["x"]
        with pytest.raises(Rejected) as rejected:
            await complete(one, "red", LONG)
        assert rejected.value.reject.reason is Reason.RATE_LIMITED
        assert rejected.value.reject.retry_after is not None
        assert one.generator.tokenized == ["x"]
        assert (await complete(one, "blue", LONG)).request.prompt_tokens == 1_250
        with pytest.raises(Rejected):
            await one.service.gate.generate(await complete(one, "red", "short text"))

    one = play(bench, scenario, tenants("red", "blue", tokens_per_minute=1_000))
    assert one.outcomes == ["met", "rejected", "rejected"]


def play(bench, scenario, tenants: dict[str, object], **sections: object):
    return bench(scenario, generator=SlowTokenizer(), tenants=tenants, **sections)


def test_a_long_text_is_charged_by_its_tokens_once_they_are_known(bench):
    async def scenario(one) -> None:
        one.generator.allowed.set()
        job = await complete(one, "red", LONG)
        assert (job.charged_tokens, job.request.prompt_tokens) == (500, 1_250)
        async for _ in await one.service.gate.generate(job):
            pass
        # The capacity of 2,000 less 1,250 of the prompt and 4 of the output.
        rates = one.service.gate._rates
        now = one.service.gate.clock.now()
        assert rates.try_charge("red", now, 746) is None
        assert rates.try_charge("red", now, 1) is not None

    play(bench, scenario, tenants("red", tokens_per_minute=2_000))


def test_requests_are_counted_once_whether_charged_early_or_not(bench):
    async def scenario(one) -> None:
        one.generator.allowed.set()
        for text in (LONG, "short"):
            async for _ in await one.service.gate.generate(await complete(one, "red", text)):
                pass
        with pytest.raises(Rejected):
            await one.service.gate.generate(await complete(one, "red", "third"))

    play(bench, scenario, tenants("red", requests_per_minute=2))


def test_all_choices_are_charged(bench):
    async def scenario(one) -> None:
        async for _ in await one.service.gate.generate(await complete(one, "red", "hi", n=10, max_tokens=50)):
            pass
        with pytest.raises(Rejected) as rejected:
            await one.service.gate.generate(await complete(one, "red", "hi"))
        assert rejected.value.reject.reason is Reason.RATE_LIMITED

    play(bench, scenario, tenants("red", tokens_per_minute=450))


@pytest.mark.parametrize(
    ("values", "charged"),
    [
        ({}, 100),
        ({"logprobs": 0}, 110),
        ({"logprobs": 20}, 310),
        ({"logprobs": 4, "n": 2}, 300),
        ({"logprobs": 4, "prompt_logprobs": 4}, 155),
    ],
)
def test_log_probabilities_are_charged_as_tenths_of_tokens(bench, values, charged):
    """Ten tokens of prompt and 100 of output."""

    async def scenario(one) -> None:
        async for _ in await one.service.gate.generate(
            await complete(one, "red", "x" * 40, max_tokens=100, **values)
        ):
            pass
        rates, now = one.service.gate._rates, one.service.gate.clock.now()
        left = 1_000 - 10 - charged
        assert rates.try_charge("red", now, left + 1) is not None
        assert rates.try_charge("red", now, left) is None

    play(bench, scenario, tenants("red", tokens_per_minute=1_000))


def test_slow_tokenizations_of_one_tenant_leave_a_slot_to_others(bench):
    async def scenario(one) -> None:
        generator = one.generator
        asking = [asyncio.create_task(complete(one, "red", "r" + LONG)) for _ in range(4)]
        await asyncio.sleep(0.1)
        assert generator.tokenized == ["r"], "one of two slots"
        assert (await complete(one, "red", "short")).request.prompt_tokens == 2
        asking.append(asyncio.create_task(complete(one, "blue", "b" + LONG)))
        await asyncio.sleep(0.1)
        assert generator.tokenized == ["r", "s", "b"]
        generator.allowed.set()
        assert [job.request.prompt_tokens for job in await asyncio.gather(*asking)] == [1_251] * 5

    play(bench, scenario, tenants("red", "blue"), server={"limits": {"tokenizer_threads": 2}})


def test_choices_take_a_slot_each(bench):
    async def scenario(one) -> None:
        gate = one.service.gate

        async def free_slots() -> int:
            return gate.dry_run(await complete(one, "red", "hi")).basis.share.free_slots

        before = await free_slots()
        stream = await gate.generate(await complete(one, "red", "hi", n=3))
        assert await free_slots() == before - 3
        async for _ in stream:
            pass
        assert await free_slots() == before

    play(bench, scenario, tenants("red"))


def test_embeddings_are_charged_early_too(bench):
    async def scenario(one) -> None:
        async def ask(text: str):
            origin = RequestOrigin("test", Caller("red"))
            return await one.service.intake.embeddings(origin, one.embedder.model, [text])

        job = await ask(LONG)
        assert job.charged_tokens == 5_000
        await one.service.gate.embed(job)
        with pytest.raises(Rejected) as rejected:
            await ask(LONG)
        assert rejected.value.request.prompt_tokens == 5_000

    embedder = ScriptedEmbedder(max_input_tokens=10_000, batch_tokens=10_000)
    models = {"chat": {"model": "scripted"}, "embeddings": [{"model": embedder.model}]}
    bench(scenario, embedder=embedder, models=models, tenants=tenants("red", tokens_per_minute=6_000))


def test_prompts_before_short_texts_count_too(bench):
    """A request may have 2,048 short texts, each with a prompt before it."""

    async def scenario(one) -> None:
        async def charged(prompt: str | None) -> int | None:
            origin, texts = RequestOrigin("test", Caller("red")), ["a"] * 50
            job = await one.service.intake.embeddings(origin, one.embedder.model, texts, prompt=prompt)
            return job.charged_tokens

        assert await charged(None) is None
        assert await charged("query") == 50

    embedder = ScriptedEmbedder(prompts={"query": "x" * 100})
    models = {"chat": {"model": "scripted"}, "embeddings": [{"model": embedder.model}]}
    bench(scenario, embedder=embedder, models=models, tenants=tenants("red"))


@pytest.mark.parametrize("fields", [{"description": LONG}, {"parameters": {"enum": [[]] * 5_000}}])
def test_a_conversation_of_long_tools_waits_for_a_slot(bench, fields):
    async def scenario(one) -> None:
        prompt = ChatPrompt(
            [{"role": "user", "content": "hi"}],
            [{"type": "function", "function": {"name": "f", **fields}}],
        )
        job = await one.service.intake.chat(
            RequestOrigin("test", Caller("red")), one.generator.model, prompt,
            max_tokens=4, sampling=Sampling(max_tokens=4),
        )  # fmt: skip
        assert job.charged_tokens == 1

    play(bench, scenario, tenants("red"))


def test_a_prompt_that_was_tokenized_takes_four_bytes_a_token(bench):
    """A list of token ids takes nine times as much, and up to admission.max_waiting prompts wait."""

    async def scenario(one) -> None:
        options = {"max_tokens": 4, "sampling": Sampling(max_tokens=4)}
        origin, model, intake = RequestOrigin("test", Caller("red")), one.generator.model, one.service.intake
        messages = ChatPrompt([{"role": "user", "content": "é" * 500}])
        for job in (
            await intake.chat(origin, model, messages, **options),
            await intake.completion(origin, model, "é" * 500, **options),
        ):
            assert list(job.prompt) == list(("é" * 500).encode())
            assert sys.getsizeof(job.prompt) <= 4 * 1_000 + 200

    bench(scenario, generator=ScriptedGenerator(max_model_tokens=5_000))


class CheckedGrammars(ScriptedGenerator):
    """A generator whose grammars are checked when `allowed`; one of type "regex" is refused."""

    def __init__(self) -> None:
        super().__init__(max_model_tokens=50_000)
        self.checked: list[str] = []
        self.allowed = asyncio.Event()

    async def check_grammar(self, sampling, chat, *, tenant, in_turn) -> None:
        async def compile_grammar() -> None:
            self.checked.append(tenant)
            await self.allowed.wait()

        if sampling.structure is not None:
            await in_turn(compile_grammar)
            if sampling.structure["type"] == "regex":
                raise Refused("the regular expression is too long", param="structured_outputs.regex")


def constrained(one, tenant: str, kind: str = "json_object"):
    sampling = Sampling(max_tokens=4, structure={"type": kind})
    return one.service.intake.completion(
        RequestOrigin("test", Caller(tenant)), one.generator.model, "text",
        max_tokens=4, sampling=sampling,
    )  # fmt: skip


def test_a_grammar_is_charged_before_it_is_checked_and_only_once(bench):
    async def scenario(one) -> None:
        one.generator.allowed.set()
        job = await constrained(one, "red")
        assert (job.charged_tokens, job.request.prompt_tokens) == (4, 4)
        async for _ in await one.service.gate.generate(job):
            pass
        assert (await complete(one, "red", "text")).charged_tokens is None
        # Its one request a minute is used up.
        with pytest.raises(Rejected) as rejected:
            await constrained(one, "red")
        assert rejected.value.reject.reason is Reason.RATE_LIMITED
        assert one.generator.checked == ["red"]

    limits = tenants("red", requests_per_minute=1)
    one = bench(scenario, generator=CheckedGrammars(), tenants=limits)
    assert one.outcomes == ["met", "rejected"]


def test_a_refused_grammar_enters_no_queue(bench):
    async def scenario(one) -> None:
        one.generator.allowed.set()
        with pytest.raises(Refused, match="too long"):
            await constrained(one, "red", "regex")

    assert bench(scenario, generator=CheckedGrammars(), tenants=tenants("red")).outcomes == []


def test_a_tenant_does_not_have_all_processes_that_check_grammars(bench):
    async def scenario(one) -> None:
        hostile = [asyncio.create_task(constrained(one, "red")) for _ in range(5)]
        await asyncio.sleep(0)
        other = asyncio.create_task(constrained(one, "blue"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert one.generator.checked == ["red", "blue"]
        one.generator.allowed.set()
        await asyncio.gather(other, *hostile)

    processes = {"limits": {"grammar_processes": 2}}
    bench(scenario, generator=CheckedGrammars(), tenants=tenants("red", "blue"), server=processes)
