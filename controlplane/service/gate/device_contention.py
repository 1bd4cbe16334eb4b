"""Tells the LLM engines of embedding passes on their device, for `decode_pacing`."""

from collections.abc import Collection
from functools import partial

from controlplane.core.ports import Embedder, Generator
from controlplane.service.encoder_registry import EncoderRegistry


class DeviceContention:
    """Signals to the LLM engines whether an embedding pass is under way on the device that they share."""

    def __init__(self, generators: Collection[Generator], encoders: EncoderRegistry) -> None:
        self._generators = generators
        self._computing: set[Embedder] = set()
        for embedder in encoders.values():
            self._observe(embedder)
        encoders.on_added.append(self._observe)

    def _observe(self, embedder: Embedder) -> None:
        embedder.on_computing = partial(self._changed, embedder)

    def _changed(self, embedder: Embedder, is_computing: bool) -> None:  # noqa: FBT001 - signature of `on_computing`
        was_shared = bool(self._computing)
        if is_computing:
            self._computing.add(embedder)
        else:
            self._computing.discard(embedder)
        if was_shared is not bool(self._computing):
            self.notify()

    def notify(self) -> None:
        """Sends the engines the present state; also to call when an engine has restarted."""
        for generator in self._generators:
            generator.set_device_contention(is_shared=bool(self._computing))
