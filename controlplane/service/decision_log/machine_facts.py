"""The sizes of the engines and of the memory that they share, as a replay needs them."""

from collections.abc import Mapping

from controlplane.core.clock import to_seconds
from controlplane.core.ports import Embedder, Generator
from controlplane.service.decision_log.log_rows import Row

# Two lengths and two numbers of inputs, as far as the model and its largest batch allow.
_SHORT, _LONG, _FEW, _MANY = 16, 256, 1, 16


def machine_facts(
    generators: Mapping[str, Generator],
    embedders: Mapping[str, Embedder],
    *,
    pool_bytes: int | None,
    workspace_bytes: int,
) -> Row:
    """The sizes of all backends; `pool_bytes` is the memory that moving quotas divide, None if none move."""
    return {
        "pool_bytes": pool_bytes,
        "workspace_bytes": workspace_bytes,
        "generators": {
            generator.model: {
                "kv_bytes": generator.kv_bytes,
                "block_tokens": generator.geometry.block_tokens,
                "elements_per_token": generator.geometry.elements_per_token,
                "bytes_per_element": generator.geometry.bytes_per_element,
                "max_model_tokens": generator.max_model_tokens,
                "max_running": generator.max_running,
                "has_prefix_cache": generator.has_prefix_cache,
                "has_step_prior": generator.step_cost is not None,
            }
            for generator in generators.values()
        },
        "embedders": {
            embedder.model: {
                "workspace_bytes": embedder.workspace_bytes,
                "bytes_per_token": _bytes_per_token(embedder),
                "max_input_tokens": embedder.max_input_tokens,
                "max_running": embedder.max_running,
                "sharing": embedder.sharing.value,
            }
            for embedder in embedders.values()
        },
    }


def _bytes_per_token(embedder: Embedder) -> int:
    length = min(_LONG, embedder.max_input_tokens)
    return max(1, round(embedder.batch_bytes([length]) / length))


def idle_pass_cost(embedder: Embedder) -> tuple[float, float, float] | None:
    """Seconds per pass, padded token, and padded token times length, of one model on an idle device.

    They follow from the times that the embedder predicts of three passes; None if it predicts none. What
    rounding makes negative is 0.
    """
    short, long = min(_SHORT, embedder.max_input_tokens), min(_LONG, embedder.max_input_tokens)
    if short == long:
        short = max(1, long // 2)
    points = [(_FEW, short), (_MANY, short), (_FEW, long)]
    times = [embedder.batch_time([length] * inputs) for inputs, length in points]
    if times[0] is None or times[1] is None or times[2] is None:
        return None
    one, many, single = (to_seconds(time) for time in times if time is not None)
    # Per token of a short and of a long input: token + square * length.
    of_short = (many - one) / (_MANY - _FEW) / short
    base = max(0.0, one - of_short * short)
    of_long = (single - base) / long
    square = max(0.0, (of_long - of_short) / (long - short)) if long > short else 0.0
    return base, max(0.0, of_short - square * short), square
