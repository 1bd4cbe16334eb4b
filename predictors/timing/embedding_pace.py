"""Learns the present pace of each embedding model from its passes."""

from collections.abc import Iterable, Mapping

from controlplane.core.clock import Duration, Instant
from controlplane.core.pool_view import Pace
from controlplane.core.ports import Embedder
from predictors.calibration import TimeCalibration
from predictors.timing.online_step_time import OBSERVATIONS, clipped

# A full embedding batch, which gives the time per token under load: texts, and tokens of each.
_PASSAGES, _PASSAGE_TOKENS = 32, 512
_UNCLIPPED_PASSES = 5
_OUTDATED = 2.0
# Without noise, sizes that differ by less than rounding show no time per token.
_LEAST_BELIEF = 1e-9


class PassPace:
    """Pace of the passes of one embedding model: `step` for a pass, `per_prompt_token` for each token.

    A pass takes a constant time, which holds the steps of the LLM before and after it, and a time per token.
    Both are fitted by least squares over about the last 64 passes, each time clipped to within a factor
    of four of the expected one. If after a long pause (`Pace.is_old`) a pass takes less than half of that,
    all passes before the pause count as one: they ran beside another load. The time per token has a normal
    prior: that of an idle device, with a standard deviation of the same size. Where steps of the LLM vary by
    more than the passes do, it decides.
    Work of more than one pass has the constant time once per `limit` tokens, so its share of that is part of
    the time per token.

    Args:
        limit: most tokens of a pass.
        idle_per_token: ns per token on an idle device; 0: unknown, the mean time per token takes its place.
    """

    def __init__(self, limit: int, *, idle_per_token: float = 0.0) -> None:
        self.limit = limit
        self.idle_per_token = idle_per_token
        self.calibration = TimeCalibration(memory=OBSERVATIONS)
        self.last_end = Instant(0)
        self._passes = 0
        # Decayed sums of 1, x, y, x^2, x*y and y^2 for passes of x tokens that took y ns.
        self._sums = [0.0] * 6

    @property
    def pace(self) -> Pace | None:
        """Times of a pass; None before the first."""
        count, x, y, xx, xy, yy = self._sums
        if not count:
            return None
        prior = self.idle_per_token or y / x
        varied = max(0.0, xx - x * x / count)
        shared = xy - x * y / count
        noise = max(0.0, yy - y * y / count - (shared * shared / varied if varied else 0.0)) / count
        # Weight of the prior in `varied`: variance of a pass over that of the prior.
        believed = max(noise / prior**2 if prior else 0.0, _LEAST_BELIEF * xx)
        per_token = max(0.0, (shared + believed * prior) / (varied + believed))
        fixed = (y - per_token * x) / count
        if fixed < 0.0:
            fixed, per_token = 0.0, xy / xx
        return Pace(Duration(round(fixed)), Duration(round(per_token + fixed / self.limit)))

    def observe_pass(self, tokens: int, took: Duration, *, ended: Instant | None = None) -> None:
        """Learns from a pass, which ended at `ended` if that is known."""
        if tokens <= 0:
            return
        seen = float(took)
        if (pace := self.pace) is not None:
            expected = float(pace.step + pace.per_prompt_token * tokens)
            self.calibration.record(expected, seen)
            is_old = ended is not None and pace.is_old(self.last_end, Instant(ended - took), tokens)
            if is_old and _OUTDATED * seen < expected:
                self._sums = [part / self._sums[0] for part in self._sums]
            elif self._passes > _UNCLIPPED_PASSES:
                seen = clipped(seen, expected)
        self.last_end = self.last_end if ended is None else ended
        self._passes += 1
        new = (1.0, tokens, seen, tokens**2, tokens * seen, seen**2)
        self._sums = [(1 - 1 / OBSERVATIONS) * old + part for old, part in zip(self._sums, new, strict=True)]


class ModelPaces:
    """Paces of embedding models, one worker process each; `pace` is the one over all of them."""

    def __init__(self, embedders: Iterable[Embedder]) -> None:
        self._all = PassPace(limit=1)
        self._of: dict[str, PassPace] = {}
        for embedder in embedders:
            self.add(embedder)

    def add(self, embedder: Embedder) -> None:
        """Adds a model, or begins anew for one whose worker was replaced.

        The start-up profile counts as one observation only, because it was measured on an idle device, and a
        token takes longer while an LLM runs.
        """
        self._of[embedder.model] = pace = PassPace(embedder.pass_tokens)
        self._all.limit = max(self._all.limit, embedder.pass_tokens)
        lengths = [min(_PASSAGE_TOKENS, embedder.max_input_tokens)] * _PASSAGES
        if took := embedder.batch_time(lengths):
            pace.idle_per_token = took / sum(lengths)
            self._all.idle_per_token = max(self._all.idle_per_token, pace.idle_per_token)
            self.observe_pass(lengths[0], Duration(took // _PASSAGES), model=embedder.model)

    @property
    def pace(self) -> Pace | None:
        """Times of a pass, over all models; None before the first."""
        return self._all.pace

    def pace_of(self, model: str) -> Pace | None:
        """Pace of one model, also after its removal, for the requests that it still has."""
        return self._of[model].pace

    def calibration_of(self, model: str) -> TimeCalibration:
        """How the times of the passes of one model compare with the expected ones."""
        return self._of[model].calibration

    def last_passes(self) -> Mapping[str, Instant]:
        """When the last pass of each model ended; 0 before the first."""
        return {model: pace.last_end for model, pace in self._of.items()}

    def observe_pass(
        self, tokens: int, took: Duration, *, model: str | None, ended: Instant | None = None
    ) -> None:
        """Learns from a pass of `model`; None: of one whose worker has been replaced."""
        self._all.observe_pass(tokens, took, ended=ended)
        if model is not None:
            self._of[model].observe_pass(tokens, took, ended=ended)
