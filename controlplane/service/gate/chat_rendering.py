"""Renders conversations, and takes the images out of them: their data does not stay with the request.

Images come in the request itself, as data URLs. An address would have the server fetch what a client names,
also from networks that only the server reaches.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from controlplane.config.limits_section import LimitsSection
from controlplane.core.errors import Refused
from controlplane.core.generation import ChatPrompt, EncodedImage, ImageLimits
from controlplane.core.ports import Generator
from controlplane.core.text_limits import LONG_TEXT_CHARACTERS, total_length

_DATA_URL = re.compile(r"^data:image/[\w.+-]{1,40};base64,", re.IGNORECASE)
_SHOWN_CHARACTERS = 40


class ChatRendering:
    """Renders conversations within the current `server.limits`."""

    def __init__(self, limits: LimitsSection) -> None:
        self.set_limits(limits)

    def set_limits(self, limits: LimitsSection) -> None:
        """Renders conversations within these limits from now on."""
        self._limits = ImageLimits(limits.max_images, limits.max_image_bytes, limits.max_image_pixels)

    def opened(self, generator: Generator, prompt: ChatPrompt) -> ChatPrompt:
        """The prompt with its images out of its messages.

        Raises Refused for images beyond the limits, for other addresses than data URLs, and for any image if
        the model takes none. Costs no more than a pass over the messages' parts.
        """
        images: list[EncodedImage] = []
        messages = [
            {**message, "content": self._parts(generator, message, at, images)}
            if _has_images(message.get("content"))
            else message
            for at, message in enumerate(prompt.messages)
        ]
        if not images:
            return prompt
        self._check_sizes(images)
        return replace(prompt, messages=messages, images=images)

    async def render(
        self, generator: Generator, prompt: ChatPrompt, *, choices: int = 1
    ) -> tuple[Sequence[int], ChatPrompt]:
        """Token ids, those of images included, and the prompt with its images processed. Raises Refused."""
        if generator.images is None or not prompt.images:
            return await generator.render_chat(prompt), prompt
        found = await generator.images.render(prompt, replace(self._limits, choices=choices))
        return found.token_ids, replace(prompt, images=(), processed=found.images)

    def _parts(
        self, generator: Generator, message: Mapping[str, Any], at: int, images: list[EncodedImage]
    ) -> list[Mapping[str, Any]]:
        parts: list[Mapping[str, Any]] = []
        for place, part in enumerate(message["content"]):
            if part.get("type") != "image_url":
                parts.append(part)
                continue
            url, field = part["image_url"]["url"], f"messages[{at}].content"
            # Other protocols state the field that they had it from.
            where, field = (part["field"],) * 2 if "field" in part else (f"{field}: part {place}", field)
            if (rule := self._broken_rule(generator, message["role"], url, len(images))) is not None:
                raise Refused(f"{where} {rule}", param=field, code="invalid_value")
            images.append(EncodedImage(where, _DATA_URL.sub("", url, count=1)))
            parts.append({"type": "image"})
        return parts

    def _broken_rule(self, generator: Generator, role: str, url: str, before: int) -> str | None:
        """Why an image after `before` others is refused."""
        if generator.images is None:
            return f"is an image; only text is passed on to {generator.model}, so send text"
        if role != "user":
            return f"is an image in a message of role {role}; send it in a message of role user"
        if before >= self._limits.count:
            return f"is one image more than server.limits.max_images, {self._limits.count}; send fewer"
        if _DATA_URL.match(url) is None:
            return (
                f"has the address {url[:_SHOWN_CHARACTERS]!r}; nothing is fetched for a client, so send the "
                "image itself: data:image/png;base64,… (or jpeg, webp)"
            )
        return None

    def _check_sizes(self, images: Sequence[EncodedImage]) -> None:
        size = sum(len(image.data) for image in images) * 3 // 4
        if size > self._limits.size:
            raise Refused(
                f"messages: the images have {size:,} bytes, and server.limits.max_image_bytes is "
                f"{self._limits.size:,}; send smaller or fewer images",
                param="messages",
                code="image_too_large",
            )


def rendering_length(prompt: ChatPrompt) -> int:
    """Characters that are rendered; images take as long as a long text."""
    length = total_length(prompt)
    return length + LONG_TEXT_CHARACTERS if prompt.images else length


def _has_images(content: object) -> bool:
    return isinstance(content, list) and any(part.get("type") == "image_url" for part in content)
