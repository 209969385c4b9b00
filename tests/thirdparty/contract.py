"""What this backend's own test suite consists of."""

import os
from pathlib import Path

import pytest
from modelrunner_fake import FakeBackend

from modelrunner.backend import BackendContext
from modelrunner.testing import BackendContract
from modelrunner.types import Bundle, Mode, ModelFormat, ModelHeader, RunSpec


class TestFake(BackendContract):
    @pytest.fixture
    def backend(self, tmp_path):
        settings = {"engine": os.environ["FAKE_ENGINE"]}
        return FakeBackend(BackendContext(engines=tmp_path, cache=tmp_path, logs=tmp_path, settings=settings))

    @pytest.fixture
    def spec(self, tmp_path):
        file = Path(tmp_path, "model.gguf")
        file.write_bytes(b"GGUF")
        bundle = Bundle(
            "sha256:" + "1" * 64,
            ("fake",),
            ModelFormat.GGUF,
            tmp_path,
            {file.name: file},
            ModelHeader({}, ()),
            4,
            None,
            frozenset(),
        )
        return RunSpec(bundle.model_id, bundle, Mode.COMPLETION, 512, 1)
