"""The items of an answer: their order, and deltas that end one item and begin another."""

from typing import Any

import pytest

from controlplane.api.openai.chat import ShownParts
from controlplane.api.openai.output_items import OutputItems
from controlplane.core.errors import BackendFailed
from controlplane.core.generation import Delta, TokenLogprob


def call(index: int, arguments: str, *, name: str | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {"index": index, "function": {"arguments": arguments}}
    if name is not None:
        found |= {"id": f"call_{index}", "type": "function"}
        found["function"]["name"] = name
    return found


def delta(text: str = "", *calls: dict[str, Any], reasoning: str = "", **fields: Any) -> Delta:
    return Delta(0, text, (1, 2), reasoning=reasoning, tool_calls=calls, **fields)


def items_of(*deltas: Delta) -> tuple[OutputItems, list[str]]:
    """The items, and each step with its item."""
    output = OutputItems(ShownParts(has_logprobs=True, is_single_call=False, hides_reasoning=False))
    steps = [change for each in deltas for change in output.add(each)] + list(output.close())
    return output, [f"{step.step} {step.item.index}{step.piece and ':'}{step.piece}" for step in steps]


def test_each_item_is_complete_before_the_next():
    output, steps = items_of(
        delta(reasoning="Hm"), delta("a"), delta("b", call(0, "{", name="f")), delta("", call(0, "}")),
        delta("", call(1, "{}", name="g")),
    )  # fmt: skip
    assert steps == [
        *("opened 0", "grown 0:Hm", "closed 0"),
        *("opened 1", "grown 1:a", "grown 1:b", "closed 1"),
        *("opened 2", "grown 2:{", "grown 2:}", "closed 2"),
        *("opened 3", "grown 3:{}", "closed 3"),
    ]
    assert [(item.kind, item.name, item.text) for item in output.items] == [
        ("reasoning", "", "Hm"),
        ("text", "", "ab"),
        ("call", "f", "{}"),
        ("call", "g", "{}"),
    ]


def test_text_after_the_end_of_a_call_in_one_delta_follows_it():
    _, steps = items_of(delta("", call(0, "{", name="f")), delta("Done", call(0, "}")))
    assert steps == ["opened 0", "grown 0:{", "grown 0:}", "closed 0", "opened 1", "grown 1:Done", "closed 1"]


def test_text_before_a_call_in_one_delta_precedes_it():
    _, steps = items_of(delta("", call(0, "{}", name="f")), delta("And", call(1, "{}", name="g")))
    assert steps[3:] == ["opened 1", "grown 1:And", "closed 1", "opened 2", "grown 2:{}", "closed 2"]


def test_call_that_continues_after_the_next_has_begun_fails():
    with pytest.raises(BackendFailed, match="continued call 0"):
        items_of(delta("", call(0, "{", name="f"), call(1, "{", name="g")), delta("", call(0, "}")))


def test_answer_without_output_has_one_empty_text():
    output, steps = items_of(delta(finish_reason="stop"))
    assert steps == ["opened 0", "closed 0"]
    assert (output.items[0].kind, output.finish_reason) == ("text", "stop")


def test_logprobs_wait_for_their_text_and_those_of_reasoning_and_calls_are_left_out():
    first, second, other = (TokenLogprob(token, -1.0) for token in "abc")
    output, _ = items_of(
        delta(reasoning="Hm", logprobs=(other,)),
        delta(logprobs=(first,)),
        delta("ab", logprobs=(second,)),
        delta("", call(0, "{}", name="f"), logprobs=(other,)),
        delta("c", logprobs=(other,)),
    )
    assert [item.logprobs for item in output.items] == [[], [first, second], [], [other]]
