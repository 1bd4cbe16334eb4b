"""Engine arguments that contradict Tandem's scheduler are refused by name."""

import pytest

from backends.vllm.argument_names import with_tandem_scheduler
from controlplane.policy.engine.options import EngineOptions


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scheduling_policy": "priority"}, "scheduling_policy is set by scheduling.engine"),
        ({"watermark": 0.05}, "watermark=0.05 keeps blocks free"),
        ({"data_parallel_size": 2}, "data_parallel_size starts several schedulers"),
    ],
)
def test_an_argument_that_contradicts_the_scheduler_is_refused(arguments: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        with_tandem_scheduler(arguments, EngineOptions())


def test_other_arguments_are_kept():
    found = with_tandem_scheduler({"max_num_seqs": 8, "watermark": 0.0}, EngineOptions())
    assert found["max_num_seqs"] == 8 and "tandem" in found["additional_config"]
