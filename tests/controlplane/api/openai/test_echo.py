"""Completions that begin with their prompt, with its log probabilities or alone."""

from tests.controlplane.api.example_bodies import TEXT, text
from tests.controlplane.api.openai.test_chat import asked, chunks
from tests.controlplane.api.scripted_server import TEXT as SAID
from tests.controlplane.api.scripted_server import WORDS, Stage


async def test_echo(stage: Stage):
    body = (await stage.http.post(TEXT, json=text(prompt=["x", "y"], n=2, temperature=1, echo=True))).json()
    assert [c["text"] for c in body["choices"]] == [p + SAID for p in ("x", "x", "y", "y")]
    assert body["usage"]["completion_tokens"] == 12


async def test_an_echoed_prompt_may_be_token_ids(stage: Stage):
    body = (await stage.http.post(TEXT, json=text(prompt=[[104, 105], [33]], echo=True))).json()
    assert [choice["text"] for choice in body["choices"]] == ["hi" + SAID, "!" + SAID]


async def test_log_probabilities_of_an_echoed_prompt(stage: Stage):
    ask = text(prompt="hi!", n=2, temperature=1, echo=True, logprobs=1)
    whole = (await stage.http.post(TEXT, json=ask)).json()["choices"]
    for choice in whole:
        found = choice["logprobs"]
        assert found["tokens"] == ["h", "byte105", "byte33", *WORDS]
        assert found["token_logprobs"] == [None, -0.25, -0.25, -0.5, -0.5, -0.5]
        assert found["top_logprobs"][:2] == [None, {"byte105": -0.25}]
        assert found["text_offset"] == [0, 1, 8, 14, 19, 26]
    first, *rest = [chunk["choices"][0] for chunk in await chunks(stage, TEXT, ask)]
    assert first["text"] == "hi!" + WORDS[0]
    assert first["logprobs"]["tokens"] == ["h", "byte105", "byte33", WORDS[0]]
    assert rest[-1]["logprobs"] == {
        "tokens": [WORDS[2]],
        "token_logprobs": [-0.5],
        "top_logprobs": [{WORDS[2]: -0.5, "other0": -1.0}],
        "text_offset": [26],
    }
    assert asked(stage).prompt_logprobs == 1


async def test_without_output_tokens_only_the_prompt_is_returned(stage: Stage):
    ask = text(prompt="hi", echo=True, logprobs=0, max_tokens=0)
    whole = (await stage.http.post(TEXT, json=ask)).json()
    [choice] = whole["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hi", "length")
    assert choice["logprobs"]["tokens"] == ["h", "byte105"]
    assert whole["usage"]["completion_tokens"] == 0
    [chunk] = await chunks(stage, TEXT, ask)
    assert (chunk["choices"][0]["text"], chunk["choices"][0]["logprobs"]) == ("hi", choice["logprobs"])
    assert asked(stage).max_tokens == 1
