"""The running server on asyncio: the only package that owns mutable state."""
