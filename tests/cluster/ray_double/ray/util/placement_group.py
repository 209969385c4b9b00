"""Granted at once: nobody else is here. The folder FAKE_RAY has a file `group-ID` for each, with its bundles and their
nodes."""

import json
import os
import uuid
from pathlib import Path


class GroupId(str):
    def hex(self):
        return str(self)


class placement_group:
    def __init__(self, bundles, bundle_label_selector):
        self.id = GroupId(uuid.uuid4().hex)
        nodes = [selector["ray.io/node-id"] for selector in bundle_label_selector]
        self.file.write_text(json.dumps(list(zip(nodes, bundles, strict=True))))

    @property
    def file(self):
        return Path(os.environ["FAKE_RAY"]) / f"group-{self.id}"

    def wait(self, seconds):
        return True


def remove_placement_group(group):
    group.file.unlink()
