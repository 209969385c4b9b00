"""What an edit or a variation begins with: the parts of its form, the picture, and the mask."""

import io
from email.message import Message
from email.parser import BytesParser
from typing import Any

from modelrunner_http import Refused
from PIL import Image, ImageOps

FILES = ("image", "image[]", "mask")
_KINDS = ("PNG", "JPEG", "WEBP")
_MOST_PIXELS = 1 << 24
"""Of a picture that is sent. Its memory is known before it is decoded."""
_OPAQUE = 128
"""Where the alpha of a mask is less, there is drawn."""


def parts(content_type: str, body: bytes) -> dict[str, list[bytes]]:
    """Returns the contents of a form (RFC 7578) by the names of its parts. The daemon has read the form before: its
    boundary stands between parts alone, and each part has a name that is read in one way."""
    head = Message()
    head["Content-Type"] = content_type
    boundary = head.get_boundary()
    if head.get_content_type() != "multipart/form-data" or boundary is None:
        raise Refused("send multipart/form-data with a part `image`")
    values: dict[str, list[bytes]] = {}
    for part in (b"\r\n" + body).split(b"\r\n--" + boundary.encode("latin-1"))[1:-1]:
        fields, _, data = part.partition(b"\r\n\r\n")
        name = BytesParser().parsebytes(fields.lstrip(b"\r\n")).get_param("name", "", "content-disposition")
        values.setdefault(str(name), []).append(data)
    return values


def source(parts_by_name: dict[str, list[bytes]]) -> tuple[Any, Any]:
    """Returns the picture, and the mask of the same size, white where is to be drawn: the transparent part of `mask`,
    or else of the picture itself; None without one. Raises `Refused`."""
    pictures, masks = (
        [*parts_by_name.get("image", ()), *parts_by_name.get("image[]", ())],
        parts_by_name.get("mask", ()),
    )
    if len(pictures) != 1:
        raise Refused(f"the form has {len(pictures) or 'no'} pictures: send one, as `image`", "image")
    if len(masks) > 1:
        raise Refused("`mask` must be given once", "mask")
    picture = _opened(pictures[0], "image")
    mask = _mask(_opened(masks[0], "mask") if masks else picture)
    if masks and mask is None:
        raise Refused("`mask` has no transparent pixels: they say where to draw", "mask")
    if mask is not None and mask.size != picture.size:
        sizes = [f"{each.width}x{each.height}" for each in (mask, picture)]
        raise Refused(f"`mask` has {sizes[0]} pixels, and `image` {sizes[1]}: they must be the same", "mask")
    return picture.convert("RGB"), mask


def _opened(data: bytes, name: str) -> Any:
    """Returns the picture with an alpha. Raises `Refused`."""
    try:
        with Image.open(io.BytesIO(data), formats=_KINDS) as opened:
            size = opened.size
            if size[0] * size[1] <= _MOST_PIXELS:
                return ImageOps.exif_transpose(opened).convert("RGBA")
    except Exception:  # whatever a decoder raises for a hostile file
        raise Refused(f"`{name}` is no picture in {', '.join(_KINDS)}", name) from None
    raise Refused(f"`{name}` has {size[0]}x{size[1]} pixels: send at most {_MOST_PIXELS} in all", name)


def _mask(picture: Any) -> Any:
    alpha = picture.getchannel("A")
    return alpha.point(lambda each: 0 if each >= _OPAQUE else 255) if alpha.getextrema()[0] < _OPAQUE else None


Image.MAX_IMAGE_PIXELS = None  # it only warns up to twice this number; `_opened` refuses
