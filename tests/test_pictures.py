"""One decoder for every picture: upright, with its own tones, on white. Files are made by hand where Pillow makes
none."""

from __future__ import annotations

import io
import struct
import zlib
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from tests.encoding import TOY, make
from tests.shard_files import open_source, record, write_tar
from volunteer_kit.data.codes import CodeSource
from volunteer_kit.data.pictures import UPRIGHT, decode_image
from volunteer_kit.data.settings import Filters
from volunteer_kit.data.source import LeftOut, Limits
from volunteer_kit.train_tokenizer import read_pictures

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def quarters(*colours: tuple[int, int, int], size: int = 64) -> Image.Image:
    """A picture of two by two colours."""
    return Image.fromarray(np.array(colours, np.uint8).reshape(2, 2, 3)).resize((size, size), Image.Resampling.NEAREST)


def corners(pixels: np.ndarray) -> list[tuple[int, ...]]:
    """The middles of the four quarters, to the nearest of 0, 128 and 255."""
    near, far = len(pixels) // 4, 3 * len(pixels) // 4
    found = pixels[[near, near, far, far], [near, far, near, far]].astype(float)
    return [tuple(min((0, 128, 255), key=lambda level: abs(level - value)) for value in pixel) for pixel in found]


def with_orientation(image: Image.Image, orientation: int, kind: str) -> bytes:
    """`image` as a camera stores it that was held in another way."""
    undo = {5: 5, 6: 8, 7: 7, 8: 6}.get(orientation, orientation)
    stored = image.transpose(UPRIGHT[undo]) if undo in UPRIGHT else image
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(stored, kind, exif=exif, **({"quality": 95} if kind == "JPEG" else {"lossless": True}))


UP = [RED, GREEN, BLUE, WHITE]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned_upright(kind, orientation):
    assert corners(decode_image(with_orientation(quarters(*UP), orientation, kind), 16)) == UP


def test_a_turned_picture_keeps_its_own_middle():
    image = Image.new("RGB", (64, 32), BLUE)
    image.paste(RED, (16, 0, 48, 32))
    for orientation in range(1, 9):
        assert corners(decode_image(with_orientation(image, orientation, "PNG"), 16)) == [RED] * 4


@pytest.mark.parametrize("exif", [b"garbage", b"MM\0\x2a\xff\xff\xff\xff", b"II*\0\x08\0\0\0\xff\xff"])
def test_damaged_exif_costs_no_picture(exif):
    assert corners(decode_image(saved(quarters(*UP), "JPEG", quality=95, exif=b"Exif\0\0" + exif), 16)) == UP


@pytest.mark.parametrize("value", [0, 9, 65535])
def test_an_orientation_that_there_is_not_is_upright(value):
    assert corners(decode_image(with_orientation(quarters(*UP), value, "JPEG"), 16)) == UP


# channels and depths


def png(width: int, depth: int, colours: int, rows: bytes, clear: bytes = b"", palette: bytes = b"") -> bytes:
    """A PNG of equal rows, as many as it is wide."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, width, depth, colours, 0, 0, 0)
    image = zlib.compress((b"\0" + rows) * width)
    chunks = [(b"IHDR", header), (b"PLTE", palette), (b"tRNS", clear), (b"IDAT", image)]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*each) for each in chunks if each[1]) + chunk(b"IEND", b"")


def words(*values: int) -> bytes:
    return struct.pack(f">{len(values)}H", *values)


GREY, LIGHT = (117, 117, 117), (156, 156, 156)  # of 30000 and 40000
BLACK = (0, 0, 0)


@pytest.mark.parametrize(
    ("data", "row"),
    [
        (png(4, 16, 0, words(0, 30000, 40000, 65535)), [BLACK, GREY, LIGHT, WHITE]),
        (png(4, 16, 0, words(0, 30000, 40000, 65535), words(30000)), [BLACK, WHITE, LIGHT, WHITE]),
        (png(2, 16, 4, words(30000, 65535, 30000, 0)), [GREY, WHITE]),
        (png(4, 16, 2, words(0, 0, 0, 30000, 0, 65535, 65535, 65535, 65535, 40000, 40000, 40000)),
         [BLACK, (117, 0, 255), WHITE, LIGHT]),
        (png(2, 16, 2, words(30000, 0, 65535, 0, 0, 0), words(30000, 0, 65535)), [WHITE, BLACK]),
        (png(2, 16, 6, words(0, 0, 65535, 65535, 0, 0, 65535, 0)), [BLUE, WHITE]),
        (png(4, 8, 0, bytes([0, 100, 200, 255]), words(100)), [BLACK, WHITE, (200, 200, 200), WHITE]),
        (png(4, 4, 0, bytes([0x01, 0x2F]), words(1)), [BLACK, WHITE, (34, 34, 34), WHITE]),
        (png(4, 2, 0, bytes([0b00011011]), words(1)), [BLACK, WHITE, (170, 170, 170), WHITE]),
        (png(2, 1, 0, bytes([0b01000000]), words(0)), [WHITE, WHITE]),
        (png(2, 8, 2, bytes([255, 0, 0, 0, 0, 255]), words(255, 0, 0)), [WHITE, BLUE]),
        (png(3, 8, 3, bytes([0, 1, 2]), bytes([255, 0]), bytes([*RED, *GREEN, *BLUE])), [RED, WHITE, BLUE]),
        (png(2, 8, 3, bytes([0, 1]), bytes([255, 128]), bytes([*RED, *BLACK])), [RED, (127, 127, 127)]),
        (png(2, 8, 4, bytes([0, 255, 0, 0])), [BLACK, WHITE]),
    ],
)  # fmt: skip
def test_every_depth_and_transparency_of_a_png(data, row):
    pixels = decode_image(data, len(row)).astype(int)
    assert abs(pixels - np.array(row)[None]).max() <= 1, pixels[0].tolist()


@pytest.mark.parametrize(
    ("image", "kind", "colours"),
    [
        (quarters(*UP), "GIF", UP),
        (quarters(*UP), "BMP", UP),
        (quarters(*UP).convert("CMYK"), "JPEG", UP),
        (quarters(*UP).convert("L"), "JPEG", None),
        (quarters(BLACK, BLACK, WHITE, WHITE).convert("1"), "BMP", [BLACK, BLACK, WHITE, WHITE]),
        (quarters(*UP).convert("RGBA"), "WEBP", UP),
    ],
)
def test_other_kinds_and_colours(image, kind, colours):
    pixels = decode_image(saved(image, kind), 16)
    if colours is None:
        assert np.array_equal(pixels[..., 0], pixels[..., 2]) and 60 < pixels[4, 4, 0] < 90
    else:
        assert corners(pixels) == colours


def test_ycck_is_turned_back():
    """Adobe's JPEGs of four channels: the marker says that they are YCCK."""
    data = saved(quarters(*[(128, 128, 128)] * 4).convert("CMYK"), "JPEG", quality=95)
    marker = data.index(b"Adobe")
    changed = data[: marker + 11] + b"\2" + data[marker + 12 :]
    plain, ycck = (decode_image(each, 4)[0, 0].tolist() for each in (data, changed))
    assert plain != ycck and abs(np.array(plain) - 128).max() < 4


def test_of_an_animation_the_first_picture_is_taken():
    frames = [Image.new("RGB", (16, 16), colour) for colour in (RED, GREEN, BLUE)]
    for kind in ("GIF", "WEBP", "PNG"):
        data = saved(frames[0], kind, save_all=True, append_images=frames[1:])
        assert corners(decode_image(data, 8)) == [RED] * 4
    clear = Image.new("RGBA", (16, 16), (0, 0, 0, 0))
    assert decode_image(saved(clear, "GIF"), 8).min() == 255


@pytest.mark.parametrize("kind", ["TIFF", "ICO", "PPM", "TGA", "PCX"])
def test_other_formats_are_not_opened(kind):
    with pytest.raises(LeftOut, match="bad_image"):
        decode_image(saved(Image.new("RGB", (16, 16)), kind), 8)


@pytest.mark.parametrize("kind", ["GIF", "BMP"])
def test_a_picture_that_would_fill_the_memory_is_left_out(kind):
    data = bytearray(saved(Image.new("L", (8, 8)), kind))
    at, form = (6, "<HH") if kind == "GIF" else (18, "<ii")
    struct.pack_into(form, data, at, 9000, 9000)
    with pytest.raises(LeftOut, match="image_too_large"):
        decode_image(bytes(data), 8)


# every road


def test_every_road_sees_the_same_pixels(tmp_path):
    """A sideways photo, and a grey of 16 bits: shards, tables, code shards and train-tokenizer."""
    turned = with_orientation(quarters(*UP), 6, "JPEG")
    grey = png(32, 16, 0, words(*range(0, 65536, 2048)))
    shard = write_tar(tmp_path / "0.tar", record("0", "turned", turned), record("1", "grey", grey))
    source = open_source(shard)
    images = [source.use(raw).image for raw in source.read(str(shard), 0, None, 1e18)]
    assert corners(images[0]) == UP and 110 < images[1][8, 8, 0] < 145
    assert np.array_equal(images, [decode_image(data, 16) for data in (turned, grey)])
    pictures = read_pictures(str(shard), 16, lambda text: None).permute(0, 2, 3, 1).mul(255).round()
    assert np.array_equal(pictures.numpy().astype(np.uint8), images)
    make(shard, tmp_path / "out", TOY)
    made = str(tmp_path / "out" / "0.tar")
    codes = CodeSource(
        [made], codes=4, num_codes=256, tokenizer=None, filters=Filters(), limits=Limits(), counts=Counter()
    )
    red = [[image[0, 0, 0], image[0, -1, 0], image[-1, 0, 0], image[-1, -1, 0]] for image in images]
    assert [codes.use(raw).codes.tolist() for raw in codes.read(made, 0, None, 1e18)] == np.array(red).tolist()


def test_a_gif_with_a_long_comment_is_left_out_at_once():
    """Pillow 11 joins its blocks in quadratic time: 32 MB would hold the interpreter for minutes."""
    whole = saved(quarters(*UP), "GIF")
    head = 13 + (3 << ((whole[10] & 7) + 1))
    comment = b"\x21\xfe" + (b"\xff" + b"c" * 255) * 5000 + b"\0"
    with pytest.raises(LeftOut, match="bad_image"):
        decode_image(whole[:head] + comment + whole[head:], 8)
    short = b"\x21\xfe\x03abc\0"
    assert corners(decode_image(whole[:head] + short + whole[head:], 16)) == UP


def test_a_picture_with_a_very_long_side_is_left_out():
    """Pillow 11 makes room for the rows that a run-length BMP skips before it looks how many there are."""
    data = bytearray(saved(Image.new("L", (8, 8)), "BMP"))
    struct.pack_into("<ii", data, 18, 40_000_000, 1)
    with pytest.raises(LeftOut, match="image_too_large"):
        decode_image(bytes(data), 8)
