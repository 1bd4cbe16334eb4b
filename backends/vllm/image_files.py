"""Decodes image files that clients send, within limits that are checked before any pixel is decoded."""

import base64
import binascii
import re
from collections.abc import Sequence
from io import BytesIO

from PIL import Image, ImageOps

from controlplane.core.errors import Refused
from controlplane.core.generation import EncodedImage, ImageLimits

_FORMATS = ("PNG", "JPEG", "WEBP")
# Each scan of a progressive JPEG is decoded over the whole image, and the smallest has 14 bytes: 200 of them
# took 1 s for 4 million pixels, and 3.6 MB hold 250,000. Encoders write about ten, and few segments besides.
_MOST_SCANS, _MOST_SEGMENTS = 64, 1_000
_JPEG_BEGIN, _SCAN, _END = b"\xff\xd8", 0xDA, 0xD9
# All markers that a length follows: not stuffed and fill bytes, restarts and TEM.
_MARKER = re.compile(rb"\xff([\x02-\xcf\xd8-\xfe])")


def decoded(images: Sequence[EncodedImage], limits: ImageLimits) -> list[Image.Image]:
    """The images in RGB. Raises Refused; the sizes are checked before any pixel is decoded."""
    opened, pixels = [], 0
    for image in images:
        found = _opened(image)
        pixels += found.width * found.height * limits.choices
        if pixels > limits.pixels:
            raise Refused(
                f"{image.where}: with this image of {found.width:,} x {found.height:,} the request has "
                f"{pixels:,} pixels{_for_choices(limits)}, and server.limits.max_image_pixels is "
                f"{limits.pixels:,}; send smaller or fewer images",
                param="messages",
                code="image_too_large",
            )
        opened.append(found)
    return [_in_rgb(image, stated) for image, stated in zip(opened, images, strict=True)]


def _for_choices(limits: ImageLimits) -> str:
    return f" for its {limits.choices} choices" if limits.choices > 1 else ""


def _opened(stated: EncodedImage) -> Image.Image:
    try:
        data = base64.b64decode(stated.data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _broken(stated, f"is not valid base64: {error}") from error
    if data.startswith(_JPEG_BEGIN):
        _check_scans(data, stated)
    try:
        return Image.open(BytesIO(data), formats=_FORMATS)
    except Exception as error:
        # Decoders raise exceptions of many types for broken files.
        raise _broken(stated, "is no PNG, JPEG or WebP image, or too large for one") from error


def _check_scans(data: bytes, stated: EncodedImage) -> None:
    """Raises Refused for a JPEG file with more scans or segments than encoders write."""
    at = scans = segments = 0
    while (found := _MARKER.search(data, at + len(_JPEG_BEGIN))) and found[1][0] != _END:
        segments, scans = segments + 1, scans + (found[1][0] == _SCAN)
        if scans > _MOST_SCANS or segments > _MOST_SEGMENTS:
            raise _broken(stated, f"has more than {_MOST_SCANS} scans or {_MOST_SEGMENTS:,} segments")
        # The length of the segment follows its marker, and counts its own two bytes.
        at = found.start() + int.from_bytes(data[found.end() : found.end() + 2])


def _in_rgb(image: Image.Image, stated: EncodedImage) -> Image.Image:
    """The first frame as viewers show it, with transparent parts in white as in vLLM, without metadata."""
    try:
        image.load()
        upright = _upright(image)
        back = Image.new("RGB", upright.size, "white")
        if "A" in upright.getbands() or "transparency" in upright.info:
            front = upright.convert("RGBA")
            back.paste(front, mask=front.getchannel("A"))
        else:
            back.paste(upright.convert("RGB"))
    except Exception as error:
        raise _broken(stated, f"cannot be decoded: {error}") from error
    return back


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:
        # Metadata that cannot be read states no orientation; the pixels are sound.
        return image


def _broken(stated: EncodedImage, cause: str) -> Refused:
    return Refused(
        f"{stated.where}: the image {cause}; send a whole PNG, JPEG or WebP file in base64",
        param="messages",
        code="invalid_image",
    )
