"""States which scheduling hints to the operating system and the CUDA driver are in force on this machine.

They favour the chat model over the embedding workers; the device time is divided without them, too.
"""

from collections.abc import Iterator, Sequence

from controlplane.config import Config
from controlplane.config.active_mechanisms import Mechanism
from controlplane.config.models_section import WorkerModel
from controlplane.service.preflight import HintFacts


def scheduling_hints(config: Config, facts: HintFacts) -> list[Mechanism]:
    """The hints that apply to the devices of the workers; none unless a chat model is served, too."""
    if config.models.chat is None:
        return []
    workers = config.models.encoders
    maybe_on_cpu = [model for model in workers if not (model.device or "").startswith("cuda")]
    maybe_on_cuda = [model for model in workers if (model.device or "cuda").startswith("cuda")]
    return [
        *(_idle_class(maybe_on_cpu, facts) if maybe_on_cpu else ()),
        *(_mps(maybe_on_cuda, facts) if maybe_on_cuda else ()),
    ]


def _idle_class(workers: Sequence[WorkerModel], facts: HintFacts) -> Iterator[Mechanism]:
    is_wanted = any(worker.idle_cpu_priority is not False for worker in workers)
    why = "while a generation runs and every embedding can wait"
    if not is_wanted:
        why = "idle_cpu_priority: false"
    elif not facts.may_leave_idle_class:
        why = "this process may not leave it; permit that with CAP_SYS_NICE or `ulimit -e 20`"
    is_used = is_wanted and facts.may_leave_idle_class
    yield Mechanism("SCHED_IDLE for embedding workers", is_used, why)


def _mps(workers: Sequence[WorkerModel], facts: HintFacts) -> Iterator[Mechanism]:
    missing = f"no MPS server at {facts.mps_folder}"
    is_lowered = any(worker.mps_below_normal is not False for worker in workers)
    why = "below normal" if is_lowered else "mps_below_normal: false"
    yield Mechanism(
        "CUDA_MPS_CLIENT_PRIORITY", facts.has_mps and is_lowered, why if facts.has_mps else missing
    )
    shares = [w.mps_thread_percentage for w in workers if w.mps_thread_percentage is not None]
    why = ", ".join(f"{share} %" for share in shares) or "mps_thread_percentage is not set"
    is_used = facts.has_mps and bool(shares)
    yield Mechanism("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", is_used, why if facts.has_mps else missing)
