"""Scenarios on a simulated generator and a simulated embedder, in virtual time."""

import asyncio

from benchmark_control_plane.simulator.virtual_time import run
from controlplane.core.kv_geometry import KvGeometry

GEOMETRY = KvGeometry(elements_per_token=1, bytes_per_element=1, block_tokens=4)


def run_engines(scenario, generator, embedder):
    """The result of `scenario(generator, embedder)`; both are started before and stopped after it."""

    async def main():
        await generator.start()
        await embedder.start()
        try:
            return await asyncio.wait_for(scenario(generator, embedder), 10_000)
        finally:
            await generator.stop()
            await embedder.stop()

    return run(main())
