"""Measures quantile coverage of the length predictor over a stream, after switches, and during generation."""

from collections.abc import Sequence
from math import comb
from random import Random
from statistics import mean
from typing import Any

import numpy as np

from benchmark_control_plane.experiments.prediction.methods import (
    at_levels,
    forecasts,
    learned_predictor,
    pinball_losses,
)
from benchmark_control_plane.experiments.prediction.prompt_sets import ARENA_MODELS, PromptSample
from predictors.output_length.learned_predictor import LearnedLengths
from predictors.output_length.quantile_model import ENOUGH, fit

_GROWTH = 1.5
_SETTLED = 500
_STREAM = 4_000
_BEFORE, _AFTER = 1_000, 1_500
_LEAST, _MOST = 0.88, 0.92


def is_covered(samples: Sequence[PromptSample], *, one_name: bool) -> list[bool]:
    """Whether each output is within its 0.9 quantile, from a cold start, with models trained on the way.

    With `one_name` all requests carry the same model name, so that a switch of the model is not announced.
    """
    lengths, due, found = LearnedLengths(use_prior=False), ENOUGH, []
    for sample in samples:
        request = sample.request(model="llm" if one_name else None)
        found.append(sample.tokens <= lengths.forecast(request).quantile(0.9))
        lengths.observe(request, sample.tokens)
        if lengths.examples.seen >= due:
            lengths.swap(fit(lengths.examples.table()))
            due = round(_GROWTH * due)
    return found


def coverage(samples: Sequence[PromptSample], seeds: Sequence[int]) -> dict[str, Any]:
    """Coverage of the mixed stream after its first 500 requests, and extremes over any 500 in a row.

    `outside_by_chance` is the share of windows of 500 outside the range for a calibrated, static predictor.
    """
    after, lowest, highest, windows = [], [], [], []
    for seed in seeds:
        covered_flags = is_covered(Random(seed).sample(samples, _STREAM), one_name=False)[_SETTLED:]
        rolling = np.convolve(covered_flags, np.ones(_SETTLED) / _SETTLED, "valid")
        after.append(mean(covered_flags))
        windows += _windows(covered_flags)
        lowest.append(float(rolling.min()))
        highest.append(float(rolling.max()))
    return {
        "after_500": after,
        "lowest_of_500": min(lowest),
        "highest_of_500": max(highest),
        "windows": len(windows),
        "windows_outside": _outside(windows),
        "outside_by_chance": _by_chance(),
    }


def _windows(covered_flags: Sequence[bool]) -> list[float]:
    """Coverage of consecutive windows of 500, without overlap."""
    return [
        mean(covered_flags[at : at + _SETTLED])
        for at in range(0, len(covered_flags) - _SETTLED + 1, _SETTLED)
    ]


def _outside(windows: Sequence[float]) -> float:
    return mean(not _LEAST <= covered <= _MOST for covered in windows)


def _by_chance() -> float:
    inside = range(round(_LEAST * _SETTLED), round(_MOST * _SETTLED) + 1)
    return 1 - sum(comb(_SETTLED, n) * 0.9**n * 0.1 ** (_SETTLED - n) for n in inside)


def switches(samples: Sequence[PromptSample], seeds: Sequence[int]) -> dict[str, Any]:
    """Coverage of the first 500 and of the next 1,000 requests after a switch of the model or of the traffic.

    `windows_outside` is the share of the later windows of 500 with coverage out of range.
    """
    by_source: dict[str, list[PromptSample]] = {}
    for sample in samples:
        by_source.setdefault(sample.source, []).append(sample)
    short, middle, _ = (f"arena-hard {model}" for model in ARENA_MODELS)
    cases = {
        "gpt-3.5 to gpt-4": (by_source[short], by_source[middle]),
        "gpt-4 to gpt-3.5": (by_source[middle], by_source[short]),
        "tasks to chat": (by_source["gsm8k"] + by_source["gpteacher codegen"], by_source[middle]),
        "chat to tasks": (by_source[middle], by_source["gsm8k"] + by_source["gpteacher codegen"]),
    }
    found: dict[str, Any] = {}
    for name, (before, after) in cases.items():
        first, then, windows = [], [], []
        for seed in seeds:
            random = Random(seed)
            stream = random.choices(before, k=_BEFORE) + random.choices(after, k=_AFTER)
            covered_flags = is_covered(stream, one_name=True)
            first.append(mean(covered_flags[_BEFORE : _BEFORE + _SETTLED]))
            then.append(mean(covered_flags[_BEFORE + _SETTLED :]))
            windows += _windows(covered_flags[_BEFORE + _SETTLED :])
        found[name] = {"first_500": first, "after_500": then, "windows_outside": _outside(windows)}
    return found


def conditional(known: Sequence[PromptSample], tested: Sequence[PromptSample]) -> dict[str, dict[str, float]]:
    """Pinball loss of the remaining length after shares of the true length.

    `minus_so_far` is that of the first forecast minus the tokens generated so far.
    """
    first_forecasts = forecasts(learned_predictor(known), tested)
    found: dict[str, dict[str, float]] = {}
    for share in (0.0, 0.25, 0.5, 0.75):
        rows = [(f, int(share * s.tokens), s.tokens) for f, s in zip(first_forecasts, tested, strict=True)]
        left = np.array([float(total - done) for _, done, total in rows])
        sharpened = np.array([at_levels(f.remaining(after=done) if done else f) for f, done, _ in rows])
        plain = np.array([np.maximum(1.0, np.array(at_levels(f)) - done) for f, done, _ in rows])
        found[f"{share:.0%}"] = {
            "conditional": float(pinball_losses(sharpened, left).mean()),
            "minus_so_far": float(pinball_losses(plain, left).mean()),
        }
    return found
