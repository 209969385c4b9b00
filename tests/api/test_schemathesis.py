"""schemathesis asks every route that destroys nothing what /openapi.json allows, and what it does not: no answer is
500, has a status or a type that is not described, or another form than its schema."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.api.conftest import StartDaemon

DESTRUCTIVE = (
    *(r"^/shutdown$", r"^/models/(create|prune|import)$", r"^/engines/(prune|reload|unload|pause|resume|pin|unpin)$"),
    *(r"^/engines/(install|update|uninstall)-backend$", r"^/keys", r"^/api/(pull|push|copy|create|delete)$"),
    *(r"/(tag|push|verify|move)$", r"_configure$", r"^/engines/preload$", r"^/pulls/"),
)
ENDLESS = (r"^/engines/events$", r"^/logs$")
CHECKS = (
    *("status_code_conformance", "content_type_conformance", "response_headers_conformance"),
    "response_schema_conformance",
)


@pytest.mark.engine
async def test_every_answer_is_as_described(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = await start_daemon(models={"smol": 0})
    async with daemon.tcp.get("/openapi.json") as answer:
        document = await answer.json()
    name_the_model(document)
    for operations in document["paths"].values():
        for operation in operations.values():
            del operation["responses"]["500"]
    (tmp_path / "openapi.json").write_text(json.dumps(document))
    daemon.backend.knobs = ("--most-tokens", "8")
    done = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli", "run", "openapi.json", "--url", f"http://127.0.0.1:{daemon.port}"),
        *("--checks", ",".join(CHECKS), "--phases", "examples,coverage,fuzzing", "--max-examples", "3", "--seed", "1"),
        *("--max-time", "120", "--request-timeout", "60", "--exclude-method", "DELETE", "--no-color"),
        *("--generation-database", "none", "--warnings", "off"),
        *("--exclude-path-regex", "|".join((*DESTRUCTIVE, *ENDLESS))),
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await done.communicate()
    assert done.returncode == 0, output.decode()[-20_000:]


def name_the_model(document: dict[str, Any]) -> None:
    """Puts a model that is here, and one that is not, in the place of any text."""
    for name, schema in document["components"]["schemas"].items():
        if name.endswith(("Request", "Fields")) and "model" in schema.get("properties", ()):
            schema["properties"]["model"] = {"enum": ["smol", "nope"]}
