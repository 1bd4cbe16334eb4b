"""Image files of clients: formats, transparency, broken files and files that decode to too much."""

import base64
import struct
import zlib
from dataclasses import replace
from io import BytesIO

import pytest
from PIL import Image

from backends.vllm.image_files import decoded
from controlplane.core.errors import Refused
from controlplane.core.generation import EncodedImage, ImageLimits

LIMITS = ImageLimits(count=4, size=10_000, pixels=10_000)


def encoded(data: bytes) -> EncodedImage:
    return EncodedImage("messages[0].content: part 1", base64.b64encode(data).decode())


def file(form: str, mode: str = "RGB", size: tuple[int, int] = (9, 7), color: object = 0) -> bytes:
    found = BytesIO()
    Image.new(mode, size, color).save(found, form)
    return found.getvalue()


def jpeg_with(*, scans: int = 0, comments: int = 0, trailer: bytes = b"") -> bytes:
    """A progressive JPEG with so many more scans and comments, and bytes after its end."""
    plain = BytesIO()
    Image.new("L", (9, 7)).save(plain, "JPEG", progressive=True)
    begin, end, data = b"\xff\xd8", b"\xff\xd9", plain.getvalue()
    last_scan = data[data.rindex(b"\xff\xda") : -len(end)]
    return begin + b"\xff\xfe\x00\x02" * comments + data[2:-2] + last_scan * scans + end + trailer


def png_of(width: int, height: int) -> bytes:
    """A PNG of 60 bytes or so that states any size."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = b"IDAT" + zlib.compress(b"")
    chunks = [
        struct.pack(">I", len(one) - 4) + one + struct.pack(">I", zlib.crc32(one)) for one in (head, body)
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_the_formats(form: str):
    (image,) = decoded([encoded(file(form))], LIMITS)
    assert (image.mode, image.size) == ("RGB", (9, 7))


def test_transparent_parts_are_white():
    (image,) = decoded([encoded(file("PNG", "RGBA", color=(0, 0, 0, 0)))], LIMITS)
    assert image.getpixel((0, 0)) == (255, 255, 255)


def test_the_orientation_of_a_photograph_is_applied_and_its_metadata_dropped():
    found, exif = BytesIO(), Image.Exif()
    exif[Image.ExifTags.Base.Orientation] = 6
    exif[Image.ExifTags.Base.Artist] = "somebody"
    Image.new("RGB", (9, 7)).save(found, "JPEG", exif=exif)
    (image,) = decoded([encoded(found.getvalue())], LIMITS)
    assert image.size == (7, 9)
    assert (image.info, dict(image.getexif())) == ({}, {})


def test_metadata_that_cannot_be_read_states_no_orientation():
    found = BytesIO()
    Image.new("RGB", (9, 7)).save(found, "JPEG", exif=b"Exif\x00\x00broken")
    (image,) = decoded([encoded(found.getvalue())], LIMITS)
    assert image.size == (9, 7)


@pytest.mark.parametrize("mode", ["L", "P", "1", "I;16"])
def test_other_modes_become_rgb(mode: str):
    (image,) = decoded([encoded(file("PNG", mode))], LIMITS)
    assert image.mode == "RGB"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no PNG, JPEG or WebP"),
        (b"hello", "no PNG, JPEG or WebP"),
        (file("GIF"), "no PNG, JPEG or WebP"),
        (file("PNG")[:45], "cannot be decoded"),
        (png_of(9, 7), "cannot be decoded"),
        (png_of(101, 100), r"101 x 100 the request has 10,100 pixels.*max_image_pixels is 10,000"),
        (png_of(2**31 - 1, 2**31 - 1), "too large"),
        (jpeg_with(scans=100), "more than 64 scans"),
        (jpeg_with(comments=1_001), "or 1,000 segments"),
    ],
    ids=[
        "empty",
        "text",
        "another format",
        "cut off",
        "without pixels",
        "too large",
        "bomb",
        "scans",
        "segments",
    ],
)
def test_files_that_are_refused(data: bytes, message: str):
    with pytest.raises(Refused, match=message) as caught:
        decoded([encoded(data)], LIMITS)
    assert str(caught.value).startswith("messages[0].content: part 1: ")
    assert caught.value.param == "messages"


def test_a_progressive_jpeg_with_bytes_after_its_end_is_decoded():
    """Cameras put short films there, in which any bytes may stand."""
    (image,) = decoded([encoded(jpeg_with(scans=20, comments=20, trailer=b"\xff\xda" * 100))], LIMITS)
    assert image.size == (9, 7)


def test_text_that_is_no_base64_is_refused():
    with pytest.raises(Refused, match="is not valid base64"):
        decoded([EncodedImage("messages[0].content: part 1", "%%%")], LIMITS)


def test_pixels_of_all_images_count_together_and_before_any_is_decoded(monkeypatch):
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("decoded"))
    with pytest.raises(Refused, match="has 10,404 pixels, and"):
        decoded([encoded(file("PNG", size=(51, 51)))] * 4, LIMITS)
    with pytest.raises(Refused, match="has 10,404 pixels for its 4 choices, and"):
        decoded([encoded(file("PNG", size=(51, 51)))], replace(LIMITS, choices=4))
