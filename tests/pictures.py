"""Pictures that a random number draws, and data files with them."""

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

Size = tuple[int, int]  # width, height


def picture(seed: int, size: Size = (112, 84)) -> Image.Image:
    """Three squares of random colors on white."""
    random = np.random.default_rng(seed)
    pixels = np.full((size[1], size[0], 3), 255, np.uint8)
    for _ in range(3):
        x, y = random.integers(0, size[0] - 20), random.integers(0, size[1] - 20)
        pixels[y : y + 20, x : x + 20] = random.integers(0, 255, 3)
    return Image.fromarray(pixels)


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def write_rows(path: Path, sizes_of_rows: Sequence[Sequence[Size]], answer: str = "1") -> Path:
    """A row of text and one picture of each size, all different, as data URIs."""
    rows, seed = [], 0
    for sizes in sizes_of_rows:
        images = [uri(png(picture(seed + number, size))) for number, size in enumerate(sizes)]
        seed += len(sizes)
        rows.append({"prompt": "<image>" * len(images) + f"How many? {seed}", "answer": answer, "images": images})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
