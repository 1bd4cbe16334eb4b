"""Trains the learned length predictor in the background.

A periodic job checks whether enough requests have finished since the last training. The examples are copied
and a separate process trains on them; the event loop then replaces the model. If the training fails, the
present model stays and the log says why.
"""

import asyncio
import logging
from pathlib import Path

from controlplane.config import Config, ConfigError
from controlplane.core.ports import LengthPredictor
from controlplane.metric_series import Readings
from controlplane.metrics import Metrics
from controlplane.service.runtime.timers import SchedulerTimer
from predictors.calibration import Calibration
from predictors.output_length import checkpoint
from predictors.output_length.checkpoint import Checkpoint, read_or_rename, save
from predictors.output_length.history_predictor import HistoryQuantiles
from predictors.output_length.learned_predictor import LearnedLengths
from predictors.output_length.quantile_model import ENOUGH
from predictors.output_length.training import train_in_subprocess

log = logging.getLogger(__name__)

# A new model is trained when this share of the examples is new, and at least so many.
_MIN_NEW_SHARE = 0.25
_MIN_NEW_EXAMPLES = 100


def calibration_of(lengths: LengthPredictor) -> Calibration | None:
    """The scores of the length forecasts; None for a predictor that keeps none."""
    return lengths.calibration if isinstance(lengths, LearnedLengths | HistoryQuantiles) else None


def calibration_readings(lengths: LengthPredictor, metrics: Metrics) -> Readings:
    """The calibration of the length forecasts; empty for a predictor that keeps none."""
    if (judged := calibration_of(lengths)) is None:
        return {}
    found = {
        metrics.length_coverage: judged.coverage(),
        metrics.length_error: judged.mean_absolute_error(),
        metrics.length_bias: judged.bias(),
        metrics.length_pinball: judged.pinball(),
        metrics.length_drift: judged.drift(),
    }
    if isinstance(lengths, LearnedLengths):
        found[metrics.length_out_of_coverage] = {
            n: float(is_out) for n, is_out in lengths.out_of_coverage().items()
        }
    return found


def require_writable_file(config: Config) -> None:
    """Checks `predictors.file` before engines are loaded, which takes minutes. Raises ConfigError."""
    file = config.predictors.file
    if config.admission.length_predictor != "learned" or file is None:
        return
    try:
        checkpoint.require_writable(file)
    except OSError as error:
        raise ConfigError(
            f"predictors.file={file}: {error.strerror}; name a file in an existing, writable folder, or "
            "remove the key"
        ) from None


class LengthTraining:
    """Trains the length model in a process of its own and saves it to `file`.

    Without a file the examples and the model are lost when the service stops.
    """

    def __init__(self, lengths: LearnedLengths, *, every_seconds: float, file: Path | None) -> None:
        self._lengths = lengths
        self._timer = SchedulerTimer()
        self._every_seconds = every_seconds
        self._file = file
        self._trained_on = 0
        self._uncovered: frozenset[str] = frozenset()
        self._is_started = False

    async def start(self) -> None:
        """Restores the examples and the model from the file, and starts the periodic job."""
        if self._file is not None:
            saved = await asyncio.to_thread(read_or_rename, self._file)
            if saved is not None:
                self._lengths.restore(saved)
                self._trained_on = self._lengths.examples.seen - saved.untrained
        self._timer.schedule_periodic(self._every_seconds, self.train_if_due)
        self._is_started = True

    async def stop(self) -> None:
        """Stops the job and saves the examples and the model."""
        if self._is_started:
            self._is_started = False
            self._timer.stop()
            await self._save()

    async def train_if_due(self) -> None:
        """Trains if enough examples are new; logs service classes whose forecasts lose coverage."""
        self._log_coverage()
        examples = self._lengths.examples
        new = examples.seen - self._trained_on
        if len(examples) >= ENOUGH and new >= max(_MIN_NEW_EXAMPLES, _MIN_NEW_SHARE * len(examples)):
            await self.train()

    async def train(self) -> None:
        """Trains on the present examples and replaces the model; a failure is logged."""
        seen = self._lengths.examples.seen
        try:
            model = await train_in_subprocess(Checkpoint(self._lengths.examples.table()))
        except (RuntimeError, OSError, ValueError) as error:
            log.warning("training the length model failed, the present model stays in use: %s", error)
            return
        self._lengths.swap(model)
        self._trained_on = seen
        log.info("a length model trained on %d finished requests is in use", len(self._lengths.examples))
        await self._save()

    async def _save(self) -> None:
        if self._file is None:
            return
        lengths = self._lengths
        untrained = lengths.examples.seen - self._trained_on
        state = Checkpoint(lengths.examples.table(), lengths.model, lengths.calibration_state(), untrained)
        try:
            await asyncio.to_thread(save, self._file, state)
        except OSError as error:
            log.warning(
                "predictors.file=%s: the length model was not saved: %s; free disk space, "
                "the next training saves it again",
                self._file,
                error.strerror or error,
            )

    def _log_coverage(self) -> None:
        out = frozenset(name for name, is_out in self._lengths.out_of_coverage().items() if is_out)
        for name in sorted(out - self._uncovered):
            log.warning(
                "class %s: more outputs than expected exceed their 0.9 quantile; its forecasts are widened",
                name,
            )
        for name in sorted(self._uncovered - out):
            log.info("class %s: the 0.9 quantile covers the outputs again", name)
        self._uncovered = out
