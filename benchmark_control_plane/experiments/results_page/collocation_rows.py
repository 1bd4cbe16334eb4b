"""Quotes of results on collocation for docs/results.md."""

from collections.abc import Iterator, Mapping
from typing import Any

from benchmark_control_plane.report import formats

Rows = Iterator[tuple[str, str]]
"""A description and a value of each row."""


def interference(content: Mapping[str, Any]) -> Rows:
    interval = content["workload"]["burst_interval_s"]
    for key, cell in content.items():
        if not key.startswith("chat_"):
            continue
        ratio, rate = cell["tandem_over_naive"], key.split("_")[1]
        burst = min(cell["unloaded_burst_s"].values())
        tandem, naive = (formats.share(cell[name]["burst_attainment"]) for name in ("tandem", "naive"))
        kept, pair = (formats.share(cell[name]["chat_attainment"]) for name in ("tandem", "naive"))
        alone = cell["alone"]["tandem"]["p99_ttft_ms"] / cell["alone"]["naive"]["p99_ttft_ms"]
        ttft, tpot = (
            # Passages that cost the chat nothing would leave what it has without them.
            f"{formats.times(ratio[name])} (of Tandem without passages "
            f"{formats.times(cell['alone']['tandem'][name] / cell['naive'][name])})"
            for name in ("p99_ttft_ms", "p99_tpot_ms")
        )
        yield (
            f"Chat at {rate}/s and a burst of passages every {interval:g} s ({burst:.2g} s on an idle "
            "machine) on two cores: Tandem relative to two independent servers",
            f"P99 TTFT {ttft}, P99 TPOT {tpot}, P99 TTFT {formats.times(alone)} where both serve chat alone, "
            f"passages/s {formats.times(ratio['passages_per_s'])}; chats that met their SLO: {kept} "
            f"(independent servers {pair}), bursts: {tandem} ({naive}); medians of {len(cell['runs'])} runs",
        )


def embedding_throughput(content: Mapping[str, Any]) -> Rows:
    for texts in ("queries", "passages"):
        ratios = content[texts]["ratios"]
        yield (
            f"Throughput of the embedding engine on {texts}",
            f"{formats.times(ratios['engine_over_encode'])} that of `encode` on all texts at once; over HTTP "
            f"{formats.times(ratios['tandem_http_over_encode'])} that of `encode` and "
            f"{formats.times(ratios['tandem_http_over_infinity_http'])} that of infinity-emb",
        )


def simulated_mix(content: Mapping[str, Any]) -> Rows:
    policies, best = content["summary"]["policies"], content["summary"]["best_static"]
    free = policies["no quota"]
    yield (
        "SLO attainment with adaptive quotas, mean of chat and embeddings (45 mixes and loads, simulated "
        "H100)",
        f"{formats.share(policies['dynamic']['both'])}; best fixed split "
        f"{formats.share(policies[best]['both'])}; no quotas {formats.share(free['both'])}, with "
        f"{free['failed_batches']:,} batches failed for lack of memory",
    )


def bulk_embedding(content: Mapping[str, Any]) -> Rows:
    found = []
    for name, each in content["medians"].items():
        texts = f", {each['texts_per_s']:.0f} texts/s, {each['lost']:g} lost" if "texts_per_s" in each else ""
        found.append(f"{name}: {formats.share(each['attainment'])}{texts}")
    yield (
        f"Chats in time at {content['load']:.0%} of a simulated engine's capacity beside `embed_many`, with "
        "the client's own number of open calls and with fixed ones, medians of "
        f"{len(content['windows']['embed_many'])} seeds",
        "<br>".join(found),
    )
