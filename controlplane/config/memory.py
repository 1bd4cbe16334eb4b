"""How much memory is there, and who owns which part of it?"""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass as section

from controlplane.config.fields import STRICT, Bytes, Fraction


@section(frozen=True, config=STRICT)
class PoolSection:
    """`memory` is the whole device's; what the models' weights, `activation`, `reserve` and the margin
    leave is shared out by quota."""

    memory: Bytes | Literal["auto"] = "auto"
    margin: Annotated[float, Field(ge=0, lt=1)] = 0.1
    activation: Bytes | Literal["auto"] = "auto"
    reserve: Bytes = 0


@section(frozen=True, config=STRICT)
class ShareSection:
    """A fraction of the pool."""

    nominal: Fraction


@section(frozen=True, config=STRICT)
class QuotaSection:
    llm: ShareSection = ShareSection(nominal=0.9)
    embedding: ShareSection = ShareSection(nominal=0.1)

    def __post_init__(self) -> None:
        if self.llm.nominal + self.embedding.nominal > 1 + 1e-9:
            raise ValueError(
                f"shares must sum to at most 1 and quota.llm.nominal={self.llm.nominal} + "
                f"quota.embedding.nominal={self.embedding.nominal} do not; lower one of them"
            )
