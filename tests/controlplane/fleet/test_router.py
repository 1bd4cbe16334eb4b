"""The router: worked examples, and properties under any reports and draws."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.prefix_index import block_hashes
from controlplane.fleet.load_report import LoadReport, ModelLoad, OwnerLoad
from controlplane.fleet.prefix_digest import PrefixDigest
from controlplane.fleet.router import ChosenBox, Refusal, RoutedRequest, Router, RoutingOptions

ASK = RoutedRequest("chat", "interactive", 1_000, objective=1.0)


def report(
    intercept: float = 0.02,
    *,
    batch: float | None = None,
    number: int = 1,
    free: int = 2**40,
    epoch: str = "a",
) -> LoadReport:
    """A box that reads 10,000 prompt tokens a second and embeds 100,000."""
    waits = {"interactive": intercept, "batch": intercept if batch is None else batch}
    return LoadReport(
        epoch,
        number,
        0.0,
        {"chat": ModelLoad("llm", 1e-4, 1_000), "embed": ModelLoad("embedding", 1e-5, 0)},
        {"llm": OwnerLoad(waits, 0.0, free), "embedding": OwnerLoad(waits, 0.0, free)},
    )


def fleet(*intercepts: float, options: RoutingOptions | None = None) -> Router:
    router = Router(options)
    for at, intercept in enumerate(intercepts):
        router.add(f"box-{at}")
        router.heard(f"box-{at}", report(intercept), 0.0)
    return router


def chosen(
    router: Router, request: RoutedRequest = ASK, now: float = 0.0, draws: tuple[float, float] = (0, 0)
) -> ChosenBox:
    choice = router.choose(request, now, draws)
    assert choice is not None
    return choice


def test_the_shorter_forecast_of_two_is_chosen() -> None:
    router = fleet(0.5, 0.1, 0.0)
    found = chosen(router, draws=(0.0, 0.0))
    assert found.box == "box-1"
    assert found.ttft == pytest.approx(0.2)
    assert found.work == pytest.approx(0.1032)
    assert chosen(router, draws=(0.0, 0.9)).box == "box-2"


def test_own_sends_count_until_the_next_report() -> None:
    router = fleet(0.1, 0.1)
    first = chosen(router)
    router.sent(ASK, first, 0.05)
    second = chosen(router, now=0.05)
    assert (first.box, second.box) == ("box-0", "box-1")
    router.heard("box-0", report(0.1, number=2), 0.1)
    assert chosen(router, now=0.1).box == "box-0"


def test_a_request_on_its_way_is_not_in_the_report_yet() -> None:
    router = fleet(0.1, 0.1, options=RoutingOptions(transit=0.01))
    router.sent(ASK, chosen(router), 0.095)
    router.heard("box-0", report(0.1, number=2), 0.1)
    assert chosen(router, now=0.1).box == "box-1"


def test_own_sends_of_a_later_class_do_not_delay_an_earlier_one() -> None:
    router = Router()
    for name in ("box-0", "box-1"):
        router.add(name)
        router.heard(name, report(0.1, batch=2.0), 0.0)
    batch = replace(ASK, service_class="batch", prompt_tokens=8_000)
    router.sent(batch, chosen(router, batch), 0.0)
    assert chosen(router).ttft == pytest.approx(0.2)
    assert chosen(router, batch).box == "box-1"


def test_embeddings_are_routed_by_the_same_cost() -> None:
    router = fleet(0.1, 0.1)
    embed = RoutedRequest("embed", "interactive", 50_000)
    first = chosen(router, embed)
    router.sent(embed, first, 0.0)
    assert (first.box, chosen(router, embed).box) == ("box-0", "box-1")
    # Prompts and embeddings are read by different owners.
    assert chosen(router).box == "box-0"


def test_a_box_without_memory_for_the_request_is_second() -> None:
    router = fleet(0.1, 5.0)
    router.heard("box-0", report(0.1, number=2, free=999_999), 0.0)
    assert chosen(router).box == "box-1"
    assert chosen(router, replace(ASK, prompt_tokens=999)).box == "box-0"


def test_own_sends_take_memory() -> None:
    router = fleet(0.1, 0.3)
    router.heard("box-0", report(0.1, number=2, free=1_500_000), 0.0)
    router.sent(ASK, chosen(router), 0.0)
    assert chosen(router).box == "box-1"


def test_a_silent_box_is_avoided_and_among_silent_ones_the_first_drawn_is_used() -> None:
    router = fleet(0.0, 5.0)
    router.heard("box-1", report(5.0, number=2), 2.0)
    assert chosen(router, now=2.0).box == "box-1"
    assert chosen(router, now=9.0).box == "box-0"


def test_a_new_box_is_used_before_its_first_report() -> None:
    router = Router()
    router.add("box-0")
    assert chosen(router) == ChosenBox("box-0", None, 0.0)


def test_a_box_that_does_not_serve_the_model_is_left_out() -> None:
    router = fleet(0.1, 5.0)
    drained = replace(report(number=2), models={})
    router.heard("box-0", drained, 0.0)
    assert {chosen(router, draws=(draw / 10, 0.5)).box for draw in range(10)} == {"box-1"}
    router.heard("box-1", drained, 0.0)
    assert router.choose(ASK, 0.0, (0.0, 0.0)) is None
    assert Router().choose(ASK, 0.0, (0.0, 0.0)) is None


def test_the_scarcest_model_of_an_owner_follows_the_reports() -> None:
    router = fleet(0.1, 0.1)
    assert [router.scarcest_model(owner) for owner in ("llm", "embedding", "none")] == ["chat", "embed", ""]
    both = {name: ModelLoad("embedding", 1e-5, 0) for name in ("rerank", "embed")}
    router.heard("box-0", replace(report(number=2), models=both), 0.0)
    assert router.scarcest_model("embedding") == "rerank"
    router.heard("box-1", replace(report(number=2), models={"rerank": both["rerank"]}), 0.0)
    assert router.scarcest_model("embedding") == "embed"
    router.remove("box-1")
    assert [router.scarcest_model(owner) for owner in ("llm", "embedding")] == ["", "rerank"]


def test_names_that_no_box_serves_are_not_remembered() -> None:
    router = fleet(0.1)
    router.add("new")
    for number in range(100):
        assert chosen(router, replace(ASK, model=f"unknown-{number}")).box == "new"
    assert chosen(router).box == "box-0"
    assert list(router._pools) == ["chat"]


def test_a_report_that_was_overtaken_is_ignored_but_not_that_of_a_new_process() -> None:
    router = fleet(0.5, 0.4)
    router.heard("box-0", report(0.6, number=9), 0.0)
    router.heard("box-0", report(0.1, number=8), 0.0)
    assert chosen(router).box == "box-1"
    router.heard("box-0", report(0.1, number=1, epoch="b"), 0.0)
    assert chosen(router).box == "box-0"


def test_all_routers_send_the_turns_of_a_session_to_the_same_box() -> None:
    routers = [fleet(*[0.1] * 10) for _ in range(2)]
    turns = [replace(ASK, session="s-2", prompt_tokens=100 * at) for at in range(1, 8)]
    found = {chosen(r, turn, draws=(at / 7, at / 7)).box for at, turn in enumerate(turns) for r in routers}
    assert len(found) == 1


def test_a_session_goes_to_its_second_home_while_the_first_is_dead_or_silent() -> None:
    router, talk = fleet(*[0.1] * 10), replace(ASK, session="s-2")
    first = chosen(router, talk).box
    for at in range(10):
        if (other := f"box-{at}") != first:
            router.heard(other, report(0.1, number=2), 2.0)
    second = {chosen(router, talk, now=2.0, draws=(at / 7, at / 7)).box for at in range(7)}
    assert len(second) == 1 and first not in second
    router.remove(first)
    assert {chosen(router, talk, now=2.0).box} == second
    router.add(first)
    router.heard(first, report(0.1), 2.0)
    assert chosen(router, talk, now=2.0).box == first


def test_embeddings_of_a_session_are_computed_anew_and_do_not_move_its_conversation() -> None:
    """As a RAG service sends them: the query's embedding and the answer with one x-session-id."""
    router = fleet(*[0.1] * 10)
    talk, embed = replace(ASK, session="s-1"), RoutedRequest("embed", "interactive", 50_000, session="s-1")
    home = chosen(router, talk)
    router.sent(talk, home, 0.0)
    first = chosen(router, embed, draws=(0.0, 0.0))
    router.sent(embed, first, 0.0)
    assert first.box == "box-0"
    assert first.ttft == pytest.approx(0.1 + 0.5)
    # Another one goes elsewhere, by the whole work of the first.
    second = chosen(router, embed, draws=(0.0, 0.0))
    assert (second.box, second.work) == ("box-1", pytest.approx(1e-5 * 50_032))
    for at in range(10):
        router.heard(f"box-{at}", report(0.1, number=2), 1.0)
    again = chosen(router, talk, now=1.0, draws=(0.0, 0.0))
    assert (again.box, again.ttft) == (home.box, pytest.approx(0.1 + 1e-4))


def test_blocks_belong_to_one_model() -> None:
    """An agent asks a large and a small model in turns; each has its own cache."""
    models = {name: ModelLoad("llm", 1e-4, 1_000) for name in ("chat", "small")}
    chat = replace(ASK, blocks=block_hashes(range(640), 16))
    router, small = Router(), replace(chat, model="small")

    def all_report(number: int) -> None:
        for at in range(10):
            router.add(f"box-{at}")
            router.heard(f"box-{at}", replace(report(0.1, number=number), models=models), float(number))

    all_report(1)
    router.sent(chat, chosen(router, chat, now=1.0, draws=(0.5, 0.0)), 1.0)
    all_report(2)
    first = chosen(router, small, now=2.0, draws=(0.2, 0.9))
    assert (first.box, first.ttft) == ("box-2", pytest.approx(0.1 + 0.1))
    router.sent(small, first, 2.0)
    all_report(3)
    assert chosen(router, chat, now=3.0).box == "box-5"
    assert chosen(router, small, now=3.0).box == "box-2"


def test_a_known_prefix_shortens_the_prompt_by_its_blocks() -> None:
    router = fleet(*[0.1] * 10)
    blocks = block_hashes(range(640), 16)
    router.sent(replace(ASK, blocks=blocks[:20]), chosen(router, draws=(0.5, 0.0)), 0.0)
    for at in range(10):
        router.heard(f"box-{at}", report(0.1, number=2), 1.0)
    found = chosen(router, replace(ASK, blocks=blocks), now=1.0)
    assert found.box == "box-5"
    assert found.ttft == pytest.approx(0.1 + 1e-4 * (1_000 - 320))


def test_all_routers_send_a_named_prefix_to_the_same_box() -> None:
    named = replace(ASK, prefix="manual", prefix_tokens=800)
    routers = [fleet(*[0.1] * 10) for _ in range(2)]
    found = [chosen(r, named, draws=(at / 7, at / 7)) for r in routers for at in range(7)]
    assert len({each.box for each in found}) == 1
    assert [each.ttft for each in found] == pytest.approx([0.1 + 1e-4 * 200] * 14)


@pytest.mark.parametrize(
    ("named", "missing", "worth"),
    [
        (replace(ASK, prefix="manual", prefix_tokens=800), 200, 0.32),
        (replace(ASK, session="s-2"), 1, 0.4),
        (replace(ASK, session="s-2", prefix="manual", prefix_tokens=800), 200, 0.32),
    ],
)
def test_a_home_is_left_where_it_is_busier_than_its_part_of_the_prompt_is_worth(
    named: RoutedRequest, missing: int, worth: float
) -> None:
    """The second home is next, then the better of two drawn boxes."""
    router = fleet(*[0.1] * 10)
    first = chosen(router, named).box
    router.heard(first, report(0.09 + worth, number=2), 0.0)
    assert chosen(router, named).box == first
    router.heard(first, report(0.11 + worth, number=3), 0.0)
    second = chosen(router, named)
    assert second.box != first
    assert second.ttft == pytest.approx(0.1 + 1e-4 * missing)
    router.heard(second.box, report(0.11 + worth, number=2), 0.0)
    third = chosen(router, named)
    assert third.box not in (first, second.box)
    assert third.ttft == pytest.approx(0.2)


def test_a_prefix_that_an_embedding_names_is_computed_anew() -> None:
    router = fleet(*[0.1] * 10)
    embed = RoutedRequest("embed", "interactive", 1_000, prefix="manual", prefix_tokens=800)
    boxes = [chosen(router, embed, draws=(at / 7, at / 7)) for at in range(7)]
    assert len({each.box for each in boxes}) > 1
    assert [each.ttft for each in boxes] == pytest.approx([0.1 + 1e-5 * 1_000] * 7)


def test_a_digest_overrules_what_the_router_remembers_and_outlives_reports_without_one() -> None:
    router = fleet(0.1, 0.12)
    blocks = block_hashes(range(960), 16)
    ask = replace(ASK, blocks=blocks)
    router.heard(
        "box-1", replace(report(0.12, number=2), prefixes={"chat": PrefixDigest.of(blocks, 16)}), 0.0
    )
    router.heard("box-1", report(0.12, number=3), 0.0)
    found = chosen(router, ask)
    assert found.box == "box-1"
    assert found.ttft == pytest.approx(0.12 + 1e-4 * 40)
    router.heard("box-1", report(0.12, number=1, epoch="b"), 0.0)
    assert chosen(router, ask).box == "box-0"


def test_a_refused_request_is_tried_once_more_where_there_is_room() -> None:
    router = fleet(0.9, 0.5)
    first = Refusal("box-0", 4.0)
    second = router.refused(ASK, [first], 0.0, 0.0)
    assert isinstance(second, ChosenBox)
    assert second.box == "box-1"
    assert router.refused(ASK, [first, Refusal("box-1", 3.0)], 0.0, 0.0) == 3.0


def test_a_refused_request_is_not_tried_where_the_forecast_leaves_no_room() -> None:
    assert fleet(0.9, 0.7).refused(ASK, [Refusal("box-0", 4.0)], 0.0, 0.0) == 4.0
    assert fleet(0.9).refused(ASK, [Refusal("box-0", 4.0)], 0.0, 0.0) == 4.0
    assert fleet(0.9, 0.1).refused(ASK, [Refusal("box-9", 4.0)], 0.0, 0.0) == 4.0


def test_a_refused_request_is_not_tried_where_the_forecast_is_old() -> None:
    router, first = fleet(0.9, 0.1), [Refusal("box-0", 4.0)]
    assert isinstance(router.refused(ASK, first, 1.0, 0.0), ChosenBox)
    assert router.refused(ASK, first, 1.1, 0.0) == 4.0


def test_retries_have_a_budget_of_a_tenth() -> None:
    router = fleet(0.9, 0.0, options=RoutingOptions(retry_burst=1.0))
    refusal = [Refusal("box-0", 4.0)]
    assert isinstance(router.refused(ASK, refusal, 0.0, 0.0), ChosenBox)
    assert router.refused(ASK, refusal, 0.0, 0.0) == 4.0
    for _ in range(10):
        router.sent(ASK, chosen(router, now=9.0), 9.0)
    router.heard("box-1", report(0.0, number=2), 9.5)
    assert isinstance(router.refused(ASK, refusal, 9.5, 0.0), ChosenBox)
    assert router.refused(ASK, refusal, 9.5, 0.0) == 4.0


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_a_weight_is_positive(weight: float) -> None:
    with pytest.raises(ValueError, match="send a positive number"):
        Router().add("box-0", weight)


def test_a_larger_box_is_drawn_more_often_and_a_removed_one_never() -> None:
    router = fleet(0.1, 0.1, 0.1)
    router.add("box-2", 8.0)
    first = [chosen(router, draws=((at + 0.5) / 100, 0.0)).box for at in range(100)]
    assert first.count("box-2") == 80
    router.remove("box-2")
    assert {chosen(router, draws=(at / 100, 0.0)).box for at in range(100)} == {"box-0", "box-1"}
    with pytest.raises(KeyError):
        router.remove("box-2")


# Forecasts about 0.7 of the objective, and reports mostly younger than a second: the limits of a second try.
events = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.floats(0, 1.2),
        st.floats(0, 0.4) | st.floats(0, 2),
        st.sampled_from([True, True, True, False]),
        st.floats(0, 1, exclude_max=True),
    ),
    max_size=40,
)


@given(events)
def test_a_choice_is_a_living_box_that_serves_the_model_and_its_retry_another_one(
    steps: list[tuple[int, float, float, bool, float]],
) -> None:
    router, now, serving = Router(), 0.0, set()
    for at in range(4):
        router.add(f"box-{at}", 1.0 + at)
        serving.add(f"box-{at}")
    for number, (at, intercept, pause, is_served, draw) in enumerate(steps):
        now += pause
        box = f"box-{at}"
        sent = report(intercept, number=number)
        router.heard(box, sent if is_served else replace(sent, models={}), now)
        (serving.add if is_served else serving.discard)(box)
        choice = router.choose(ASK, now, (draw, 1 - 0.9 * draw - 0.05))
        assert (choice is None) == (not serving)
        if choice is None:
            continue
        assert choice.box in serving
        assert choice.work >= 0.0
        router.sent(ASK, choice, now)
        second = router.refused(ASK, [Refusal(choice.box, 2.0)], now, draw)
        if isinstance(second, ChosenBox):
            assert second.box in serving - {choice.box}
            assert second.ttft is not None
            assert second.ttft < 0.7
        else:
            assert second == 2.0
