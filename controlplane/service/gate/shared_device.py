"""Does embedding work want the device that answers are computed on? Engines are told when that changes."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from controlplane.core.ports import Generator


class SharedDevice:
    def __init__(self, generators: Collection[Generator]) -> None:
        self._generators = generators
        self._wanting = 0

    @contextmanager
    def wanted(self) -> Iterator[None]:
        """By one request, for as long as the block lasts."""
        self._wanting += 1
        if self._wanting == 1:
            self._tell(is_shared=True)
        try:
            yield
        finally:
            self._wanting -= 1
            if self._wanting == 0:
                self._tell(is_shared=False)

    def _tell(self, *, is_shared: bool) -> None:
        for generator in self._generators:
            generator.share_device(is_shared=is_shared)
