"""Trains the prior of the length predictor and writes `predictors/output_length/prior.json`.

    python -m benchmark_control_plane.experiments.prediction.train_prior

The prior is a ridge over numeric features and cues, without words, learned from the public prompt sets with
equal weight for each set, and the quantiles of its residuals on held-out prompts.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np

from benchmark_control_plane.common.command_line import add_data, data_folder, exit_status
from benchmark_control_plane.experiments.prediction.prompt_sets import PromptSample, samples
from predictors.output_length import quantile_model
from predictors.output_length.examples import Examples, feature_row
from predictors.output_length.features import NUMBERS
from predictors.output_length.quantile_model import LEVELS
from predictors.output_length.ridge import fit_ridge

_EACH = 450
_FOLDS = 5


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmark_control_plane.experiments.prediction.train_prior", description=__doc__
    )
    add_data(parser)
    parser.add_argument("--to", type=Path, default=Path(quantile_model.__file__).with_name("prior.json"))
    options = parser.parse_args(arguments)
    known = samples(data_folder(options.data, "prompts"))
    options.to.write_text(json.dumps(prior_of(known), indent=1) + "\n", encoding="utf-8")
    print(f"wrote {options.to}")
    return 0


def prior_of(known: Sequence[PromptSample]) -> dict[str, object]:
    """Content of prior.json: centers, scales and slopes by feature, and offsets by level."""
    by_source: dict[str, list[PromptSample]] = {}
    for sample in known:
        by_source.setdefault(sample.source, []).append(sample)
    random = Random(0)
    chosen = [s for group in by_source.values() for s in random.sample(group, min(_EACH, len(group)))]
    examples = Examples(len(chosen))
    for sample in chosen:
        examples.add(feature_row(sample.request(), 0.0, 0.0), float(np.log(sample.tokens)))
    table = examples.table()
    # `max_tokens` and the history features are constant here, so their slopes are zero.
    words = np.zeros_like(table.words)
    fold = table.groups % _FOLDS
    residuals = np.zeros(len(table))
    for tested in range(_FOLDS):
        out = fold == tested
        ridge = fit_ridge(table.numbers[~out], words[~out], table.log_tokens[~out])
        residuals[out] = table.log_tokens[out] - ridge.predict(table.numbers[out], words[out])
    ridge = fit_ridge(table.numbers, words, table.log_tokens)
    names = (*NUMBERS, "log_prompt_tokens")
    return {
        "base": round(ridge.base, 4),
        **{
            part: {name: round(float(v), 4) for name, v in zip(names, values, strict=False)}
            for part, values in (("center", ridge.center), ("scale", ridge.scale), ("slopes", ridge.slopes))
        },
        "offsets": {str(level): round(float(np.quantile(residuals, level)), 4) for level in LEVELS},
    }


if __name__ == "__main__":
    sys.exit(exit_status(main))
