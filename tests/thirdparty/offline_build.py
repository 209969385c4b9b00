"""The least of a build backend (PEP 517): one module and its metadata in a wheel, by the standard library alone."""

import base64
import hashlib
import tomllib
import zipfile
from pathlib import Path
from typing import Any


def build_wheel(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    project = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]
    module = project["name"].replace("-", "_")
    info = f"{module}-{project['version']}.dist-info"
    metadata = [f"Name: {project['name']}", f"Version: {project['version']}"]
    metadata += [f"Requires-Dist: {requirement}" for requirement in project["dependencies"]]
    entries = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {target}" for name, target in points.items()))
    ]
    files = {
        **{path.name: path.read_text("utf-8") for path in Path().glob("modelrunner_*.py")},
        f"{info}/METADATA": "\n".join(["Metadata-Version: 2.1", *metadata, ""]),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: offline_build\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "\n".join([*entries, ""]),
    }
    files[f"{info}/RECORD"] = (
        "".join(f"{name},{_digest(text)}\n" for name, text in files.items()) + f"{info}/RECORD,,\n"
    )
    wheel = f"{module}-{project['version']}-py3-none-any.whl"
    with zipfile.ZipFile(Path(wheel_directory, wheel), "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel


def _digest(text: str) -> str:
    data = text.encode()
    return f"sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}"
