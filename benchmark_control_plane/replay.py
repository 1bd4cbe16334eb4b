"""Runs one policy of the round model on one instance.

`python -m benchmark_control_plane.replay FILE --policy NAME`

FILE holds {"M": cells, "requests": [{"a": arrival, "s": prompt tokens, "o": output tokens, "pred": predicted
output tokens, "d": deadline}]}. Without `pred` the prediction is exact; without `d` the request has no
deadline. Prints JSON on stdout; bad input gives one line on stderr and exit status 2. Logs of a
server are replayed by `tandem replay`, which runs the live gate instead of the round model.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from backends.cost_models.step_time import STEP_TIME_FORMS, StepTime
from benchmark_control_plane.common.command_line import (
    BadInput,
    finite,
    integer,
    items,
    print_json,
    read_object,
)
from benchmark_control_plane.round_model.instance import read_instance
from benchmark_control_plane.round_model.schedules import PolicySetting, run_policy
from benchmark_control_plane.round_model.simulator import NoProgress
from benchmark_control_plane.round_model.workloads import RoundInstance, RoundRequest


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def read_requests(source: Mapping[str, Any]) -> RoundInstance:
    """Parses the content of FILE. Raises BadInput if a value is missing or out of range."""
    checked = read_instance(source)
    requests = []
    for i, (job, entry) in enumerate(zip(checked.jobs, items(source, "requests"), strict=True)):
        predicted = integer(entry["pred"], f"requests[{i}].pred", least=1) if "pred" in entry else job.output
        due = finite(entry["d"], f"requests[{i}].d") if "d" in entry else None
        requests.append(RoundRequest(job.arrival, job.prompt, job.output, predicted, due))
    return RoundInstance(checked.memory, tuple(requests))


def read_time(text: str) -> StepTime | None:
    """Parses `unit` (None: one round is one time unit) or a model and its four parameters in seconds.

    Raises BadInput if the model is unknown or a parameter is out of range.
    """
    if text == "unit":
        return None
    name, _, listed = text.partition(":")
    try:
        values = [float(value) for value in listed.split(",")]
    except ValueError:
        values = []
    if name not in STEP_TIME_FORMS or len(values) != 4:
        raise BadInput(f"--time {text}: give unit, tile:a,b,g,d or affine:a,b,c,d, in seconds")
    for letter, value in zip("abgd" if name == "tile" else "abcd", values, strict=True):
        finite(value, f"--time {text}: {letter}")
    if values[0] <= 0 or min(values) < 0:
        raise BadInput(f"--time {text}: a must be above 0 and the other parameters at least 0")
    return STEP_TIME_FORMS[name](*values)


def replay(instance: RoundInstance, setting: PolicySetting) -> dict[str, Any]:
    """Schedules the instance and returns the result as JSON values.

    Raises BadInput on an unknown policy, a bad option, or if the policy makes no progress.
    """
    try:
        schedule = run_policy(instance.requests, instance.memory, setting)
    except (ValueError, NoProgress) as error:
        raise BadInput(str(error)) from error
    return {
        "policy": setting.policy,
        "total_latency": schedule.total_latency,
        "mean_latency": schedule.mean_latency,
        "start": schedule.start,
        "finish": schedule.finish,
        "max_usage": schedule.totals.max_usage,
        "clears": schedule.totals.clears,
        "rounds": schedule.totals.rounds,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _OneLineParser(prog="replay", description=__doc__)
    parser.add_argument("instance", help="JSON file with the instance")
    parser.add_argument("--policy", required=True, help="name of the policy")
    parser.add_argument(
        "--alpha",
        type=float,
        default=0.0,
        help="share of memory kept free (alpha-protection); at least 0, below 1",
    )
    parser.add_argument(
        "--beta", type=float, default=0.0, help="probability of being cleared in an overflow (alpha-beta)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--time", default="unit", help="step time: unit, tile:a,b,g,d or affine:a,b,c,d, in seconds"
    )
    options = parser.parse_args(arguments)

    def command() -> dict[str, Any]:
        setting = PolicySetting(
            options.policy, options.alpha, options.beta, options.seed, read_time(options.time)
        )
        return replay(read_requests(read_object(options.instance)), setting)

    return print_json(command)


if __name__ == "__main__":
    sys.exit(main())
