"""An LLM backend that returns scripted tokens: every path of the server works without a GPU or a model."""

from backends.testing.scripted import Script, ScriptedGenerator
from controlplane.config import Config
from controlplane.config.models_section import ChatModel
from controlplane.core.ports import Generator
from controlplane.service.memory.memory_plan import MemoryPlan

WORDS = ("Hello", " from", " a", " plug-in")


def scripted_engine(config: Config, chat: ChatModel, plan: MemoryPlan) -> Generator:
    """The engine for `models.chat` of the configuration."""
    return ScriptedGenerator(
        model=chat.served_name,
        kv_bytes=plan.kv_bytes,
        default=Script(tokens=len(WORDS), words=WORDS),
        prefill_seconds=0.01,
        token_seconds=0.002,
    )
