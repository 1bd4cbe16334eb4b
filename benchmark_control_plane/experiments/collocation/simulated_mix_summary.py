"""Summarises the study of adaptive quotas: means over its cells, and differences to `dynamic`."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

_CELL = ("mix", "pattern", "load", "seed")


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over the cells by policy: overall and for each mix, pattern, load and seed."""
    names = list(dict.fromkeys(row["policy"] for row in rows))
    table: dict[str, Any] = {}
    for name in names:
        own = [row for row in rows if row["policy"] == name]
        table[name] = {
            **{key: mean(row[key] for row in own) for key in ("both", "llm", "embedding", "mean_memory")},
            "peak_memory": max(row["peak_memory"] for row in own),
            **{key: sum(row[key] for row in own) for key in ("overflows", "failed_batches")},
            "by_class": {
                label: mean(row["by_class"][label] for row in own if label in row["by_class"])
                for label in sorted({label for row in own for label in row["by_class"]})
            },
            **{
                key: {
                    str(value): mean(row["both"] for row in own if row[key] == value)
                    for value in dict.fromkeys(row[key] for row in own)
                }
                for key in _CELL
            },
        }
    statics = [name for name in names if name.startswith("static")]
    best = max(statics, key=lambda name: table[name]["both"])
    pairs = {
        other: [
            row["both"] - compared["both"]
            for row in rows
            for compared in rows
            if (row["policy"], compared["policy"]) == ("dynamic", other)
            and all(row[key] == compared[key] for key in _CELL)
        ]
        for other in names
        if other != "dynamic"
    }
    against = {
        other: {
            "mean": mean(gains),
            "worst": min(gains),
            "best": max(gains),
            "cells_lost_by_over_0.005": sum(gain < -0.005 for gain in gains),
            "cells": len(gains),
        }
        for other, gains in pairs.items()
    }
    return {"best_static": best, "dynamic_less_other": against, "policies": table}
