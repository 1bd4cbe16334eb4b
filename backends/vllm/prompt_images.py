"""Renders conversations with images: vLLM's processor counts and prepares the tokens of the images.

The processed images wait with their request outside the engine, and are sent again if it resumes. Importing
this module imports vLLM, which takes seconds.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from zlib import crc32

from vllm.inputs import tokens_input

from backends.vllm import chat_template
from backends.vllm.chat_template import TemplateImages
from backends.vllm.image_files import decoded
from controlplane.core.errors import Refused
from controlplane.core.generation import (
    ChatPrompt,
    ImageLimits,
    ProcessedImages,
    RenderedImages,
)
from controlplane.core.text_limits import TextLimit

# Of the input to the engine, all but the token ids, to which a resumed request adds its own.
_CONTENT = ("type", "mm_kwargs", "mm_hashes", "mm_placeholders")


class ChatImages:
    """Renders conversations with images by the template of one model and vLLM's processor."""

    def __init__(self, renderer: Any, template: TemplateImages, limit: TextLimit) -> None:
        self.template = template
        self._renderer = renderer
        self._limit = limit

    async def render(self, prompt: ChatPrompt, limits: ImageLimits) -> RenderedImages:
        """Token ids with those of the images. vLLM processes one request at a time, in a thread.

        Raises Refused.
        """
        tokenizer = self._renderer.get_tokenizer()
        render = partial(chat_template.render, tokenizer, prompt, self._limit, self.template)
        token_ids, images = await asyncio.to_thread(lambda: (render(), decoded(prompt.images, limits)))
        given = {"prompt_token_ids": token_ids, "multi_modal_data": {"image": images}}
        try:
            # What the engine has is decided after the gate, so the processed images are always sent whole.
            found = await self._renderer.process_for_engine_async(given, time.time(), skip_mm_cache=True)
        except Exception as error:
            # Each processor raises its own exception types.
            raise Refused(
                f"the model's image processor refused the images: {error}; send others", param="messages"
            ) from error
        return RenderedImages(found["prompt_token_ids"], _processed(found))


def chat_images(renderer: Any, model_config: Any) -> Callable[[TextLimit], ChatImages] | None:
    """Makes the renderer of conversations with images; None if the model, as configured, takes none."""
    processor = getattr(renderer, "mm_processor", None)
    if processor is None or not processor.info.allowed_mm_limits.get("image"):
        return None
    from vllm.model_executor.model_loader import get_model_cls
    from vllm.renderers.hf import resolve_chat_template, resolve_chat_template_content_format

    tokenizer = renderer.get_tokenizer()
    chosen = resolve_chat_template(tokenizer, None, None, model_config=model_config)
    if tokenizer.chat_template is None:
        # Older models have the template with their processor.
        tokenizer.chat_template = chosen
    form = resolve_chat_template_content_format(chosen, None, "auto", tokenizer, model_config=model_config)
    placeholder = get_model_cls(model_config).get_placeholder_str
    template = TemplateImages(form == "openai", lambda number: str(placeholder("image", number)))
    return partial(ChatImages, renderer, template)


def engine_input(prompt: Sequence[int], chat: ChatPrompt | None) -> Any:
    """Input of the engine for a prompt that begins with the rendered conversation."""
    if chat is None or chat.processed is None:
        return tokens_input(list(prompt))
    return {**chat.processed.content, "prompt_token_ids": list(prompt)}


def _processed(found: Any) -> ProcessedImages:
    places = zip(found["mm_placeholders"]["image"], found["mm_hashes"]["image"], strict=True)
    # Beyond all token ids.
    spans = [(place.offset, place.length, 2**32 + crc32(digest.encode())) for place, digest in places]
    return ProcessedImages(spans, {key: found[key] for key in _CONTENT})
