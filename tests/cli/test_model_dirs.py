"""Folders of models that are not there, as a person sees them."""

import json

from tests.cli.conftest import Cli
from tests.cli.fake_daemon import FakeDaemon
from tests.cli.test_commands import MODEL, STATUS

TOLD = "the folder /mnt/big is not there: mount its disk"


def test_a_missing_folder_is_named_beside_its_models(daemon: FakeDaemon, cli: Cli) -> None:
    daemon.answers |= {
        "GET /version": {**STATUS, "model_dirs": {"/mnt/big": TOLD, "/tmp": ""}},
        "GET /models": [{**MODEL, "damage": TOLD}],
        "GET /engines/status": {},
        "GET /engines/df": {
            "models": [],
            "backends": [],
            "models_disk_usage": 5,
            "default_backend_disk_usage": 0,
            "partial": 0,
            "folders": [{"path": "/tmp", "size": 5, "free": 1 << 30}, {"path": "/mnt/big", "absent": TOLD}],
        },
    }
    assert TOLD in cli("ls").err
    shown = cli("df")
    assert TOLD in shown.err
    assert [line.split() for line in shown.out.splitlines() if "/tmp" in line] == [
        ["folder", "/tmp", "5B", "1GiB", "free"]
    ]
    found = [each for each in json.loads(cli("doctor", "--json").out) if each["check"].startswith("model")]
    assert [(each["check"], each["text"]) for each in found if each["state"] == "error"] == [("models folder", TOLD)]
    assert [each["text"].split(",")[0] for each in found if each["check"] == "models folder"] == [TOLD, "/tmp"]


def test_the_folder_of_a_pull_is_a_whole_path(daemon: FakeDaemon, cli: Cli) -> None:
    cli("pull", "smol", "--to", "/mnt/../mnt/big/")
    assert [body["folder"] for body in daemon.asked("POST", "/models/create")] == ["/mnt/big"]
