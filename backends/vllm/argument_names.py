"""Names of vLLM's engine arguments, and two defaults, without importing vLLM, whose import takes seconds.

The names are read from the source of the installed vLLM. An unknown argument stops the start.
"""

import ast
from collections.abc import Mapping
from dataclasses import asdict
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from controlplane.policy.engine.options import EngineOptions

SCHEDULER = "backends.vllm.scheduler.make"
_CLASSES = ("EngineArgs", "AsyncEngineArgs")
_GIB = 2**30

# Engine arguments with a place of their own in Tandem's configuration.
_SET_BY_CONFIG = {
    "model": "models.chat.model",
    "served_model_name": "models.chat.name",
    "reasoning_parser": "models.chat.reasoning_parser",
}


@cache
def known_arguments() -> frozenset[str]:
    """The fields of the installed vLLM's AsyncEngineArgs; empty if vLLM is not installed.

    Raises ValueError if its source does not define them as this module expects.
    """
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return frozenset()
    source = Path(spec.origin).parent / "engine" / "arg_utils.py"
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError) as error:
        raise ValueError(f"{source}: cannot read vLLM's engine arguments: {error}; reinstall vllm") from error
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if missing := [name for name in _CLASSES if name not in classes]:
        raise ValueError(
            f"{source}: no class {missing[0]}; install a release of vllm that this version supports"
        )
    return frozenset(
        statement.target.id
        for name in _CLASSES
        for statement in classes[name].body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    )


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises ValueError naming each unknown argument and the arguments with a similar name."""
    known = known_arguments()
    problems = []
    for name in arguments:
        if name in _SET_BY_CONFIG:
            problems.append(f"{name} is set by {_SET_BY_CONFIG[name]}")
        elif name not in known:
            close = get_close_matches(name.replace("-", "_"), known, n=3)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            problems.append(f"vLLM has no engine argument {name!r}{hint}")
    if problems:
        raise ValueError("engine arguments: " + "; ".join(problems))


def batch_defaults(gpu: str, memory_bytes: int) -> tuple[int, int]:
    """The max_num_batched_tokens and max_num_seqs that vLLM takes on a GPU of this driver name by default.

    They are those of `EngineArgs.get_batch_defaults` for vLLM's own server, as which Tandem starts engines
    (`arguments.CONTEXT`).
    """
    if memory_bytes >= 160 * _GIB:
        return 16_384, 1_024
    # Large steps slow an A100 down.
    if memory_bytes >= 70 * _GIB and "a100" not in gpu.lower():
        return 8_192, 1_024
    return 2_048, 256


def with_tandem_scheduler(arguments: Mapping[str, Any], options: EngineOptions) -> dict[str, Any]:
    """Returns `arguments` with Tandem's scheduler added. Raises ValueError if they conflict with it."""
    taken = [name for name in ("scheduler_cls", "scheduling_policy") if name in arguments]
    if taken:
        raise ValueError(f"engine arguments: {taken[0]} is set by scheduling.engine; remove one of them")
    if arguments.get("watermark"):
        raise ValueError(
            f"engine arguments: watermark={arguments['watermark']} keeps blocks free that scheduling.engine "
            "gives to requests; remove it"
        )
    if arguments.get("data_parallel_size", 1) != 1:
        raise ValueError(
            "engine arguments: data_parallel_size starts several schedulers, but scheduling.engine controls "
            "only one; remove one of them"
        )
    more = {**arguments.get("additional_config", {}), "tandem": asdict(options)}
    return {**arguments, "scheduler_cls": SCHEDULER, "additional_config": more}
