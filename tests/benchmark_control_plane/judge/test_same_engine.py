"""On a GPU, Tandem's engine configuration differs from the baseline's only in the scheduler."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.untimed]

# Runs in a subprocess, because vLLM's modules bind the platform when they are imported.
_CONFIGURES = """
import json, sys, types
from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from pathlib import Path

# Modules of compiled CUDA operators, which are not called here.
for name in ("vllm._C", "vllm._C_stable_libtorch", "vllm._moe_C"):
    if find_spec(name) is None:
        sys.modules[name] = types.ModuleType(name)

import vllm.platforms
from vllm.platforms.cuda import CudaPlatformBase
from vllm.platforms.interface import DeviceCapability

class H100(CudaPlatformBase):
    get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
    get_device_name = classmethod(lambda cls, device_id=0: "NVIDIA H100 80GB HBM3")
    get_device_total_memory = classmethod(lambda cls, device_id=0: 80 * 2**30)

vllm.platforms._current_platform = H100()

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from backends import bundled_models
from backends.vllm.argument_names import with_tandem_scheduler
from backends.vllm.arguments import CONTEXT, engine_args
from benchmark_control_plane.judge.experiment_file import read_experiment, first_variant
from benchmark_control_plane.judge.systems import tandem_config, vllm_arguments
from benchmark_control_plane.common.servers import vllm_server
from controlplane.config import parse

def flat(part, path, found):
    if is_dataclass(part):
        for field in fields(part):
            flat(getattr(part, field.name, None), f"{path}.{field.name}", found)
    else:
        found[path] = repr(part)
    return found

plan = read_experiment(Path("configs/bench/head-to-head-gpu.yaml"), Path()).plan
model, states = str(bundled_models.ensure_tiny_model()), json.loads(sys.argv[1])

def stated(arguments):
    counts = ("max_num_seqs", "max_num_batched_tokens")
    return {name: value for name, value in arguments.items() if states or name not in counts}

config = parse(tandem_config(plan, plan.live, plan.systems[0], {"interactive": {"ttft_ms": 100}}, {}))
ours = with_tandem_scheduler(stated(config.models.chat.engine), config.engine_options())
tandem = engine_args(model, "name", ours).create_engine_config(CONTEXT)

theirs = stated(vllm_arguments(plan.live, first_variant(plan.systems[1]).split))
flags = list(vllm_server(model, "name", theirs).command)
flags = flags[flags.index("--disable-uvicorn-access-log") + 1 :]
parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
parsed = parser.parse_args(["--model", model, "--served-model-name", "name", *flags])
baseline = AsyncEngineArgs.from_cli_args(parsed).create_engine_config(UsageContext.OPENAI_API_SERVER)

one, other = flat(tandem, "", {}), flat(baseline, "", {})
differ = sorted(name for name in one | other if one.get(name) != other.get(name))
print(json.dumps([str(tandem.device_config.device_type), tandem.scheduler_config.max_num_seqs, differ]))
"""


@pytest.mark.parametrize(("states", "sequences"), [(True, 256), (False, 1_024)])
def test_only_the_scheduler_differs(states, sequences):
    """Holds also without explicit max_num_seqs and max_num_batched_tokens."""
    ran = subprocess.run(
        [sys.executable, "-c", _CONFIGURES, json.dumps(states)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2_000:]
    device, running, differ = json.loads(ran.stdout.splitlines()[-1])
    assert (device, running) == ("cuda", sequences)
    assert differ == [
        ".additional_config",
        ".instance_id",
        # Acts only on requests for the log probabilities of their prompt.
        ".parallel_config.worker_extension_cls",
        # Acts only on models with layers of several kinds.
        ".scheduler_config.disable_hybrid_kv_cache_manager",
        ".scheduler_config.scheduler_cls",
    ]
