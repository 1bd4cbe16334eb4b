"""Counts blocks that requests share through the engine's prefix cache once in their footprints and leases.

A request's footprint is net of the blocks of its prompt that admitted requests use, and its prefill time net
of all that are cached. Without Tandem's scheduler in the engine, the first reader of a block pays for it in
its lease, and when it ends the next one does. With it, leases follow the engine's report.
"""

from collections.abc import Mapping
from dataclasses import replace

from controlplane.core.memory_ledger import MemoryLedger
from controlplane.core.ports import Generator
from controlplane.core.prefix_index import PrefixIndex
from controlplane.fleet.prefix_digest import PrefixDigest
from controlplane.service.request_jobs import EmbedJob, GenerateJob
from controlplane.service.ticket import Ticket


class PrefixLeases:
    """The prefix index of each generator with a prefix cache, and its effect on tickets and leases.

    `follows_engine` if the engines report the blocks of each lease.
    """

    def __init__(
        self, generators: Mapping[str, Generator], ledger: MemoryLedger, *, follows_engine: bool
    ) -> None:
        self._ledger = ledger
        self._follows_engine = follows_engine
        self._geometries = {name: generator.geometry for name, generator in generators.items()}
        self._admitted: dict[str, Ticket] = {}
        self._indexes = {
            name: PrefixIndex(
                generator.geometry.block_tokens, generator.kv_bytes // generator.geometry.bytes_per_block
            )
            for name, generator in generators.items()
            if generator.has_prefix_cache
        }

    def arrived(self, ticket: Ticket, job: GenerateJob | EmbedJob) -> None:
        """Hashes the prompt of a new ticket and makes its footprint and prefill net of the cached prefix.

        The log probabilities of a prompt need all of it computed, so the engine then ignores its cache.
        """
        if not isinstance(job, GenerateJob) or job.sampling.prompt_logprobs is not None:
            return
        if (index := self._indexes.get(job.request.model)) is not None:
            images = None if job.chat is None else job.chat.processed
            prompt = job.prompt if images is None else images.marked(job.prompt)
            ticket.prompt_blocks = index.hashes(prompt, job.request.adapter)
            self.renew(ticket)

    def renew(self, ticket: Ticket) -> bool:
        """Updates footprint and prefill of a waiting request; returns whether its footprint has grown."""
        index = self._indexes.get(ticket.request.model)
        if index is None or not ticket.prompt_blocks:
            return False
        found = index.find(ticket.prompt_blocks)
        request, footprint = ticket.request, ticket.footprint
        if (cached := found.cached * index.block_tokens) != request.cached_tokens:
            ticket.request = replace(request, cached_tokens=cached)
        shared = self._bytes(ticket, found.used)
        more = ticket.shared_bytes - shared
        if more:
            ticket.footprint, ticket.shared_bytes = replace(footprint, base=footprint.base + more), shared
        return more > 0

    def admit(self, ticket: Ticket) -> None:
        """Adds a request whose lease was opened."""
        if ticket.prompt_blocks:
            self._admitted[ticket.request.id] = ticket
            self._indexes[ticket.request.model].admit(ticket.request.id, ticket.prompt_blocks)

    def release(self, ticket: Ticket) -> None:
        """Removes a request whose lease is closed next; other readers pay for the blocks that stay in use."""
        if self._admitted.pop(ticket.request.id, None) is None:
            return
        taken_over = self._indexes[ticket.request.model].release(ticket.request.id)
        ticket.shared_bytes = 0
        if self._follows_engine:
            return
        for name, blocks in taken_over.items():
            payer = self._admitted[name]
            if payer.lease is not None:
                held = self._ledger.lease_state(payer.lease)[0] + self._bytes(payer, blocks)
                self._ledger.set_reported(payer.lease, held=held, per_step=payer.footprint.per_step)

    def report(self, ticket: Ticket) -> None:
        """Forgets the unused blocks if the engine has found fewer of the prompt's tokens than expected."""
        index = self._indexes.get(ticket.request.model)
        if index is not None and ticket.cache_hit_tokens < ticket.request.cached_tokens:
            index.forget_unused()

    def engine_died(self, model: str) -> None:
        """Forgets the cached prefixes; call it once no lease of the model is open."""
        if (index := self._indexes.get(model)) is not None:
            index.forget_unused()

    def digests(self) -> dict[str, PrefixDigest]:
        """Digest of the block hashes of each model with a prefix cache."""
        return {name: PrefixDigest.of(index, index.block_tokens) for name, index in self._indexes.items()}

    def shared(self, ticket: Ticket) -> tuple[int, int]:
        """Tokens that an admitted request shares with others, and the bytes of its lease that they use."""
        if ticket.request.id not in self._admitted:
            return 0, 0
        index = self._indexes[ticket.request.model]
        shared, paid = index.shared(ticket.request.id)
        return shared * index.block_tokens, self._bytes(ticket, paid)

    def shared_bytes(self) -> int:
        """Bytes of the blocks that two or more admitted requests use, each block counted once."""
        return sum(
            index.shared_blocks * self._geometries[model].bytes_per_block
            for model, index in self._indexes.items()
        )

    def _bytes(self, ticket: Ticket, blocks: int) -> int:
        return blocks * self._geometries[ticket.request.model].bytes_per_block
