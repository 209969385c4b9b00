"""Translates models, files and batches to the structs of wire/openai.py, in OpenAI's form."""

from typing import Any

from modelrunner import wire
from modelrunner.batches.batch import Batch, BatchState, LineError
from modelrunner.batches.filestore import UploadedFile
from modelrunner.models.abilities import Abilities
from modelrunner.store import StoredModel


def openai_model(name: str, found: StoredModel, abilities: Abilities) -> wire.OpenAIModel:
    return wire.OpenAIModel(
        id=name,
        created=found.created,
        architecture=found.config.get("architecture"),
        context_window=abilities.window or found.config.get("context_size"),
        capabilities=list(abilities.capabilities),
        backend=abilities.backend,
    )


def file(found: UploadedFile) -> wire.FileStatus:
    return wire.FileStatus(found.id, found.bytes, int(found.created), found.filename, found.purpose)


def batch(found: Batch) -> wire.BatchStatus:
    """Returns the batch object of OpenAI's API."""

    def at(moment: float | None, *states: BatchState) -> int | None:
        return int(moment) if moment is not None and (not states or found.status in states) else None

    return wire.BatchStatus(
        id=found.id,
        endpoint=found.endpoint,
        errors={"object": "list", "data": list(map(_line_error, found.errors))} if found.errors else None,
        input_file_id=found.input_file,
        completion_window=found.window,
        status=found.status.value,
        output_file_id=found.output_file,
        error_file_id=found.error_file,
        created_at=int(found.created),
        in_progress_at=at(found.created) if not found.errors else None,
        expires_at=int(found.expires),
        finalizing_at=at(found.finalizing),
        completed_at=at(found.ended, BatchState.COMPLETED),
        failed_at=at(found.ended, BatchState.FAILED),
        expired_at=at(found.ended, BatchState.EXPIRED),
        cancelling_at=at(found.cancelling),
        cancelled_at=at(found.ended, BatchState.CANCELLED),
        request_counts={"total": found.total, "completed": found.completed, "failed": found.failed},
        metadata=found.metadata or None,
    )


def _line_error(found: LineError) -> dict[str, Any]:
    return {"code": found.code, "message": found.message, "line": found.line, "param": found.param}
