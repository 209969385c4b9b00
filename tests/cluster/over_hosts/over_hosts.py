"""A backend as a package of its own, whose every run is over two hosts: the fake engine stands for one that gives its
work to workers in the placement group that it is told."""

import os
import sys
from collections.abc import Sequence

from modelrunner.backend import BackendContext
from modelrunner.types import RequiredMemory, RunSpec, Variant
from tests.fakes import FAKE_ENGINE, FakeBackend

HALF = RequiredMemory(64 << 20)


class OverHosts(FakeBackend):
    name = "over"
    executable = (os.path.realpath(sys.executable), "-I", "-S", str(FAKE_ENGINE))

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context.engines, ("--rate", "40", "--tokens", "8", "--only-for", os.environ["ENGINES_TAG"]))

    async def variants(self, spec: RunSpec, budget: RequiredMemory) -> Sequence[Variant]:
        return [Variant(spec, HALF, hosts=2, part=HALF)]
