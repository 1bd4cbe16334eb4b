"""Does an engine take what it is told? Orders that end, one way or another.

An order is taken between two steps. An engine that dies first says so (`Generator`); one that says nothing
for long may have the order, or take it yet, and whoever gave it must reckon with both.
"""

import asyncio
from collections.abc import Awaitable, Collection
from dataclasses import asdict, dataclass, field

from controlplane.core.errors import BackendDown, BackendFailed
from controlplane.core.ports import Generator
from controlplane.policy.engine.options import EngineOptions

# A step over a long prompt may take seconds.
_TIMEOUT_SECONDS = 15.0


class EngineTimeout(BackendDown):
    """The engine may have the order, or take it yet."""


async def await_engine(order: Awaitable[None], generator: Generator, name: str) -> None:
    """Raises Unanswered, and whatever the order raises."""
    try:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            await order
    except TimeoutError as error:
        raise EngineTimeout(
            f"the engine of {generator.model} took no {name} within {_TIMEOUT_SECONDS:.0f} s"
        ) from error


@dataclass(eq=False, slots=True)
class EngineConfigurator:
    """By which rules do the engines that order by themselves go? `options` is what they confirmed last; None
    where none orders. After a failure nobody knows whether it holds: then they are told all, not only what
    differs."""

    generators: Collection[Generator]
    options: EngineOptions | None
    _is_confirmed: bool = field(init=False, default=True)

    async def apply(self, options: EngineOptions | None) -> None:
        """Raises Refused, and BackendDown or BackendFailed that say what was changed and what not."""
        if options is None or (self._is_confirmed and options == self.options):
            return
        told = asdict(options)
        if self._is_confirmed and self.options is not None:
            before = asdict(self.options)
            told = {name: value for name, value in told.items() if value != before[name]}
        self._is_confirmed = False
        try:
            for generator in self.generators:
                await await_engine(generator.set_options(told), generator, "rules")
        except EngineTimeout as error:
            raise EngineTimeout(
                f"{error}; the gate keeps the former ones, but the engine may take these yet. "
                "Once it answers, change again: it is then told all"
            ) from error
        except (BackendDown, BackendFailed) as error:
            raise type(error)(f"{error}; neither it nor the gate was changed") from error
        self.options, self._is_confirmed = options, True
