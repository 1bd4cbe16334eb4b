"""The live host: asyncio, and the sole owner of mutable state."""
