"""Writes small sets in the formats of the public data, for commands that read it."""

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

_WORDS = ("say", "why", "the", "queue", "is", "long", "and", "write", "code", "that", "sorts", "a", "list")
_LENGTHS, _PROMPTS, _SECONDS = 50, 30, 90


def write_public_data(folder: Path) -> None:
    """Fills a folder as `--data` names it: lengths, prompts and traces of a minute and a half."""
    draw = Random(0)
    lengths = [(draw.randint(400, 1_500), draw.randint(5, 30)) for _ in range(_LENGTHS)]
    for name in ("sharegpt_v3_lens", "arxiv_summarization_llama2"):
        _write(folder / f"lengths/{name}.csv.gz", _csv("num_prefill_tokens,num_decode_tokens", lengths))
    for path, lines in _prompts(draw):
        _write(folder / "prompts" / path, lines)
    for path, lines in _traces(draw):
        _write(folder / "traces" / path, lines)


def _prompts(draw: Random) -> Iterator[tuple[str, list[str]]]:
    def text(words: int) -> str:
        return " ".join(draw.choices(_WORDS, k=words))

    pairs = [(text(9), text(draw.randint(2, 60))) for _ in range(_PROMPTS)]
    chats = [{"messages": [{"content": asked}, {"content": {"answer": said}}]} for asked, said in pairs]
    for model in ("gpt-3.5-turbo-0125", "gpt-4-0314", "gpt-4-0613"):
        yield f"arena_hard_v0.1/{model}.jsonl.gz", [json.dumps(chat) for chat in chats]
    tasks = [{"instruction": asked, "input": "", "response": said} for asked, said in pairs]
    for part in ("codegen", "roleplay"):
        yield f"gpteacher_{part}.json.gz", [json.dumps(tasks)]
    yield "gsm8k_test.jsonl.gz", [json.dumps({"question": asked, "answer": said}) for asked, said in pairs]
    yield (
        "humaneval.jsonl.gz",
        [json.dumps({"prompt": asked, "canonical_solution": said}) for asked, said in pairs],
    )


def _traces(draw: Random) -> Iterator[tuple[str, list[str]]]:
    times = sorted(draw.uniform(0, _SECONDS) for _ in range(2 * _SECONDS))
    azure = [(f"2023-11-16 18:{int(at) // 60:02d}:{at % 60:09.6f}", 50, 10) for at in times]
    yield "azure2023_code.csv.gz", _csv("TIMESTAMP,ContextTokens,GeneratedTokens", azure)
    # The experiment on forecasts speeds this one up 200 times.
    retrievals = [(200 * at, 7, 90, 15) for at in times]
    columns = "arrival_s,embed_query_tokens,llm_input_tokens,llm_output_tokens"
    yield "ragpulse_two_stage.csv.gz", _csv(columns, retrievals)
    for client in ("12_1tok", "14_bursty"):
        rows = [(at, 45, 1) for at in times]
        yield (
            f"servegen_msmall_client{client}_1h.csv.gz",
            _csv("arrival_s,input_tokens,output_tokens", rows),
        )


def _csv(header: str, rows: Iterable[tuple[object, ...]]) -> list[str]:
    return [header, *(",".join(map(str, row)) for row in rows)]


def _write(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
