"""The pace estimators of one box: that of its LLM engine, and those of its embedding models."""

from typing import NamedTuple

from controlplane.core.request import Owner
from predictors.timing.embedding_pace import ModelPaces
from predictors.timing.online_step_time import ObservedPace, ReportedPace


class PaceEstimators(NamedTuple):
    """The estimators of both owners."""

    llm: ObservedPace | ReportedPace
    embedding: ModelPaces

    def of(self, owner: Owner) -> ObservedPace | ReportedPace | ModelPaces:
        """The estimator of an owner."""
        return self.llm if owner is Owner.LLM else self.embedding
