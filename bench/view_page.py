"""Photographs the page of `megagrpo view` over made-up samples, at the widths of a screen and of a phone.

usage: python bench/view_page.py   # needs Chromium; writes docs/evidence/view_{1400,400}.png
"""

import base64
import io
import math
import sys
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from chromium import BrowserPage  # noqa: E402
from made_run import made_batch, made_groups  # noqa: E402

from megagrpo.config.schema import LogConfig  # noqa: E402
from megagrpo.monitor.rollout_log import RolloutLog  # noqa: E402
from megagrpo.monitor.step_log import StepLog  # noqa: E402
from megagrpo.monitor.trained import TrainedLog  # noqa: E402
from megagrpo.system.run_folder import RunFolder  # noqa: E402
from megagrpo.tools.view.command import write_view  # noqa: E402

PROMPT = "A train covers **{n} km** in the first hour, and each hour half of the hour before. How far can it get?"
RESPONSE = r"""The distances are a geometric series, so I take its sum.</think>### Sum of a series

With \(a = {n}\) and \(r = \frac12\), as \(|r| < 1\):

\[
S = \sum_{{k=0}}^{{\infty}} a r^k = \frac{{a}}{{1 - r}} = {s}
\]

| hour | km |
|-----:|---:|
| 1 | {n} |
| 2 | {h} |

```python
sum({n} / 2**k for k in range(50))
```

The train gets **{s} km** far: $\boxed{{{s}}}$."""
SIZES = {1400: 900, 400: 700}
NUM_STEPS, COLORS = 24, 200


def make(folder: RunFolder) -> None:
    """Writes the run: rewards that rise, lengths that fall."""
    log, rollouts = StepLog(folder, LogConfig(tensorboard=False)), RolloutLog(folder, 0)
    trained = TrainedLog(
        folder, 0, 2, lambda ids: [{5: "The", 6: " train", 9: " gets"}[i] for i in ids]
    )
    with closing(log), closing(rollouts), closing(trained):
        for step in range(1, NUM_STEPS + 1):
            wave = 0.04 * math.sin(2.3 * step)
            curves = {
                "reward/mean": 0.2 + 0.5 * step / NUM_STEPS + wave,
                "policy/entropy": 0.9 - 0.02 * step + wave,
            }
            log.write(step, curves | {"response/length_mean": 190 - 2.5 * step + 60 * wave})
            groups = []
            for group in made_groups(step):
                n = 8 * (step + group.group_id)
                prompt = replace(group.prompt, text=PROMPT.format(n=n), answer=str(2 * n))
                right = RESPONSE.format(n=n, h=n // 2, s=2 * n)
                texts = (
                    right,
                    f"It gets {n} km far.",
                    f"**{n + 8} km**",
                    "The train gets on and on",
                )
                samples = (
                    replace(each, text=text)
                    for each, text in zip(group.samples, texts, strict=True)
                )
                groups.append(replace(group, prompt=prompt, samples=tuple(samples)))
            rollouts.write(step, groups)
            batch = made_batch(groups)
            noise = torch.logspace(-7, -2, batch.old_logprobs.numel()).view_as(batch.old_logprobs)
            trained.write(step, batch, batch.old_logprobs + noise)


def main() -> None:
    """Writes the pictures."""
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(Path(name) / "made-up")
        make(folder)
        write_view([folder], 20.0, None)
        with BrowserPage(Path(name) / "profile") as page:
            for width, height in SIZES.items():
                size = {"width": width, "height": height}
                page.call(
                    "Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=1, mobile=False
                )
                page.open(f"{folder.view.as_uri()}?{width}#markdown=on&order=5+1")
                page.wait("document.querySelectorAll('#detail .markdown').length === 2")
                page.value("document.querySelector('#detail details').open = true")
                whole = page.value(
                    "[document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
                )
                clip = {"x": 0, "y": 0, "width": whole[0], "height": whole[1], "scale": 1}
                shot = page.call(
                    "Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True
                )["data"]
                path = ROOT / "docs" / "evidence" / f"view_{width}.png"
                picture = Image.open(io.BytesIO(base64.b64decode(shot)))
                picture.convert("RGB").quantize(COLORS).save(path, optimize=True)
                print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
