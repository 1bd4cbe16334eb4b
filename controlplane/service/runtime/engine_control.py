"""Commands to engines, each with a timeout and a defined state after a failure.

An engine executes a command between two steps. If it dies first, the command fails with BackendDown. If it
does not confirm in time, it may have executed the command or may still execute it; the sender must assume
both.
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
    """The engine did not confirm a command in time; it may still execute it."""


async def await_engine(command: Awaitable[None], generator: Generator, name: str) -> None:
    """Waits for `generator` to confirm `command`. Raises EngineTimeout, and what the command raises."""
    try:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            await command
    except TimeoutError as error:
        raise EngineTimeout(
            f"the engine of {generator.model} did not confirm its new {name} within {_TIMEOUT_SECONDS:.0f} s"
        ) from error


@dataclass(eq=False, slots=True)
class EngineConfigurator:
    """Applies new policy options to the engines that schedule by Tandem's policies.

    `options` are those last confirmed; None if vLLM's own scheduler runs. After a failure the
    engine's options are unknown, so the next change sends all of them and not only those that differ.
    """

    generators: Collection[Generator]
    options: EngineOptions | None
    _is_confirmed: bool = field(init=False, default=True)

    async def apply(self, options: EngineOptions | None) -> None:
        """Sends `options` to every engine.

        Raises:
            Refused: an engine does not accept the options.
            BackendDown, BackendFailed: the message says what was changed and what was not.
        """
        if options is None or (self._is_confirmed and options == self.options):
            return
        changes = asdict(options)
        if self._is_confirmed and self.options is not None:
            before = asdict(self.options)
            changes = {name: value for name, value in changes.items() if value != before[name]}
        self._is_confirmed = False
        try:
            for generator in self.generators:
                await await_engine(generator.set_options(changes), generator, "options")
        except EngineTimeout as error:
            raise EngineTimeout(
                f"{error}; the gate keeps its former options, but the engine may still apply these. "
                "Repeat the change once the engine responds; it then receives all options"
            ) from error
        except (BackendDown, BackendFailed) as error:
            raise type(error)(f"{error}; neither the engine nor the gate was changed") from error
        self.options, self._is_confirmed = options, True

    async def engine_restarted(self) -> None:
        """Sends all options in force, since a new engine has those of the first start."""
        if self.options is None:
            return
        for generator in self.generators:
            await await_engine(generator.set_options(asdict(self.options)), generator, "options")
        self._is_confirmed = True
