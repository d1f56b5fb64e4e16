"""Images of prompts: read, resized once to the grid of the model's processor, and kept as PNG files
by their content.

Trainers and engines read the same PNG, which no later resizing changes, so both see the same
pixels. A message's image is a part {"type": "image"}; its pixels come from the row's column or from
the part itself.
"""

import base64
import hashlib
import io
import json
import time
import urllib.parse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megagrpo.models.config_json import HfConfig
from megagrpo.models.folder import Model
from megagrpo.system.errors import explained
from megagrpo.system.run_folder import whole_file, write_whole
from megagrpo.types import IMAGE_TEXT, ImageRef

if TYPE_CHECKING:
    from torch import Tensor

    from megagrpo.monitor.metrics import Metrics
from megagrpo.system.torchvision import prepare_torchvision, torchvision_problem

_IMAGE_PART = {"type": "image"}
_PIXELS_KEPT = 64  # images; one of 1,024 tokens takes 19 MB as patches
_URIS_KEPT = 256  # images; the samples of a prompt are requested close together

Message = Mapping[str, object]
Grid = tuple[int, int, int]


def images_apart(
    messages: Sequence[Message], column: Sequence[object], marked: bool, location: str
) -> tuple[list[Message], list[object]]:
    """Returns messages whose images are parts without content, and where each image comes from, in
    order.

    column: the row's images, for the parts without a source and, if `marked`, for every `<image>`
    in the texts. Raises ValueError, naming the row, unless the numbers agree, and for parts that
    are neither text nor image.
    """
    rest = iter(column)
    sources = []
    num_marks = 0  # images that the column must have

    def parts(content: object) -> Iterator[Message]:
        nonlocal num_marks
        for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
            kind = part.get("type") if isinstance(part, dict) else part
            if kind == "text":
                texts = [str(part.get("text") or "")]
                if marked:
                    texts = texts[0].split(IMAGE_TEXT)
                for number, text in enumerate(texts):
                    if number:
                        num_marks += 1
                        sources.append(next(rest, None))
                        yield _IMAGE_PART
                    if text:
                        yield {"type": "text", "text": text}
            elif kind in ("image", "image_url"):
                source = part.get(kind) or part.get("path") or part.get("url")
                if kind == "image_url" and isinstance(source, dict):
                    source = source.get("url")
                if source is None:
                    num_marks += 1
                    source = next(rest, None)
                sources.append(source)
                yield _IMAGE_PART
            else:
                raise ValueError(
                    f"{location}: a message has a part of type "
                    f"{kind!r}; text and images are supported"
                )

    apart: list[Message] = [
        {**message, "content": list(parts(message.get("content", "")))} for message in messages
    ]
    if num_marks != len(column):
        raise ValueError(
            f"{location}: the prompt has {num_marks} {IMAGE_TEXT} and the row {len(column)} "
            f"image(s) (data.images_key); write {IMAGE_TEXT} once for each image, where it belongs"
        )
    return apart if sources else list(messages), sources


def image_bytes(source: object, folder: Path) -> bytes:
    """Returns the encoded image: bytes, {bytes, path}, a path (relative: to `folder`), or a data
    URI.

    Raises ValueError for another source, and OSError.
    """
    if isinstance(source, dict):
        source = source.get("bytes") or source.get("path")
    if isinstance(source, bytes):
        return source
    if not isinstance(source, str) or source.startswith(("http:", "https:")):
        raise ValueError(
            f"{source!r:.60} is no image: bytes, a path or a data URI; nothing is downloaded"
        )
    if source.startswith("data:"):
        return base64.b64decode(source.partition("base64,")[2], validate=True)
    if source.startswith("file://"):
        source = urllib.parse.unquote(source.removeprefix("file://"))
    return (folder / source).read_bytes()


class ImageStore:
    """The images of an experiment's prompts in a folder that its ranks share, by their keys
    (ImageRef.key)."""

    def __init__(self, processor: str, hf: HfConfig, folder: Path):
        prepare_torchvision()
        from transformers import AutoImageProcessor  # takes seconds

        with explained(
            f"{processor}: no image processor can be loaded from here",
            lambda exc: torchvision_problem(),
        ):
            self._processor = AutoImageProcessor.from_pretrained(processor, local_files_only=True)
        self.image_token = int(hf["image_token_id"])
        self.video_token = int(hf["video_token_id"])
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        # whatever else the PNG of an image depends on: the processor, and `add` (its version)
        self._settings = f"1 {self._processor.to_json_string()}".encode()
        self._grid = lru_cache(maxsize=4096)(self._grid_of_size)
        self._kept_pixels = lru_cache(maxsize=_PIXELS_KEPT)(self._pixels)
        self._kept_uri = lru_cache(maxsize=_URIS_KEPT)(self._uri)
        self._held: dict[str, int] = {}  # bytes by key
        # since the last `add_metrics`: bytes `sent` and `moved`, microseconds
        self._used: Counter[str] = Counter()

    @classmethod
    def of(cls, model: Model, folder: Path) -> "ImageStore | None":
        """Returns the store for a model's prompts; None if the model does not see images. Raises
        ValueError."""
        if not model.sees_images:
            return None
        return cls(str(model.tokenizer_folder), model.description, folder)

    def add(self, data: bytes) -> tuple[str, Grid]:
        """Returns key and grid of an encoded image, which is kept as a PNG of the size that the
        processor chooses. An image that any rank or earlier start has added is not decoded again.

        Raises Pillow's errors for data that is not an image, and ValueError for a shape that the
        processor refuses.
        """
        known = self._folder / f"{hashlib.sha256(self._settings + data).hexdigest()}.json"
        with suppress(OSError, ValueError):
            key, (t, h, w) = json.loads(known.read_bytes())
            num_bytes = self.path(key).stat().st_size
            if num_bytes:
                self._held[key] = num_bytes
                return key, (t, h, w)
        from PIL import Image, ImageOps

        with Image.open(io.BytesIO(data)) as opened:
            upright = ImageOps.exif_transpose(opened)
            if upright.mode.startswith("I;16"):  # `convert` would cut at 255
                upright = Image.fromarray((np.asarray(upright) // 257).astype(np.uint8))
            if upright.has_transparency_data:  # black would hide a drawing's black lines
                white = Image.new("RGBA", upright.size, "white")
                upright = Image.alpha_composite(white, upright.convert("RGBA"))
            if upright.mode in ("I", "F"):
                raise ValueError(
                    f"its pixels have no known range (mode {upright.mode}): write 8 bits"
                )
            image = upright.convert("RGB")
        grid = self._grid(image.size)
        size = (grid[2] * self._processor.patch_size, grid[1] * self._processor.patch_size)
        if self._grid(size) != grid:
            raise ValueError(f"the processor resizes {image.size} to {size}, and this again")
        buffer = io.BytesIO()
        image.resize(size, Image.Resampling(int(self._processor.resample))).save(buffer, "PNG")
        png = buffer.getvalue()
        key = hashlib.sha256(png).hexdigest()
        self._held[key] = len(png)
        with whole_file(self.path(key)) as draft:  # other ranks write the same bytes
            draft.write_bytes(png)
        write_whole(known, json.dumps([key, grid]))
        return key, grid

    def tokens(self, grid: Grid) -> int:
        """Returns the number of tokens of an image."""
        return grid[0] * grid[1] * grid[2] // self._processor.merge_size**2

    def expand(
        self, short_ids: np.ndarray, images: Sequence[tuple[str, Grid]]
    ) -> tuple[np.ndarray, list[ImageRef]]:
        """Returns the ids with the placeholders of every image, [T] int32, and the images with
        their positions.

        Raises ValueError unless the short ids have one placeholder per image.
        """
        ids = short_ids.astype(np.int32)
        places = np.flatnonzero(ids == self.image_token)
        if len(places) != len(images) or self.video_token in ids:
            raise ValueError(
                f"the prompt's tokens have {len(places)} image placeholder(s) for {len(images)} "
                f"image(s){', and one of a video' if self.video_token in ids else ''}: its text "
                "must not hold the placeholder itself, and the chat "
                "template must write one for each image"
            )
        counts = np.ones(len(ids), np.int64)
        refs = []
        for place, (key, grid) in zip(places, images, strict=True):
            refs.append(ImageRef(key, int(counts[:place].sum()), grid))
            counts[place] = self.tokens(grid)
        return np.repeat(ids, counts), refs

    def path(self, key: str) -> Path:
        """Returns the file of an image."""
        return self._folder / f"{key}.png"

    def png(self, key: str) -> bytes:
        """Returns the image as engines get it."""
        return self.path(key).read_bytes()

    def uri(self, key: str) -> str:
        """Returns the image as a data URI, for requests."""
        uri = self._kept_uri(key)
        self._used["sent"] += len(uri)
        return uri

    def pixels(self, key: str) -> "Tensor":
        """Returns the processor's patches of the image: [t*h*w, patch values] float32."""
        start = time.perf_counter_ns()
        pixels = self._kept_pixels(key)
        self._used.update(
            moved=pixels.nbytes, microseconds=(time.perf_counter_ns() - start) // 1000
        )
        return pixels

    def add_metrics(self, metrics: "Metrics") -> None:
        """Adds the bytes of images that are held, were sent to engines and were given to the tower,
        and its seconds."""
        used = self._used
        self._used = Counter()
        metrics.add_max("images/held_mb", sum(self._held.values()) / 1e6)
        metrics.add_sum("images/sent_mb", used["sent"] / 1e6)
        metrics.add_sum("images/moved_mb", used["moved"] / 1e6)
        metrics.add_sum("images/processing_s", used["microseconds"] / 1e6)

    def _uri(self, key: str) -> str:
        return "data:image/png;base64," + base64.b64encode(self.png(key)).decode()

    def _pixels(self, key: str) -> "Tensor":
        from PIL import Image

        with Image.open(io.BytesIO(self.png(key))) as image:
            return self._processor(images=image, return_tensors="pt")["pixel_values"]

    def _grid_of_size(self, size: tuple[int, int]) -> Grid:
        from PIL import Image

        t, h, w = self._processor(images=Image.new("RGB", size), return_tensors="pt")[
            "image_grid_thw"
        ][0].tolist()
        return t, h, w
