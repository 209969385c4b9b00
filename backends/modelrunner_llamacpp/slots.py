"""Saves the KV caches of llama-server's slots before its process ends, and restores them in the next one.

A slot holds the keys and values of one conversation or long prompt; computing them again takes seconds to minutes.
Routes: `GET /slots`, `POST /slots/ID?action=save|restore` (tools/server/README.md of llama.cpp). For a new request the
engine itself takes the slot with the longest common prefix, restored ones included.
"""

import asyncio
import hashlib
import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelrunner.sdk import Endpoint, Mode, RunSpec
from modelrunner.sdk.calls import ask
from modelrunner_llamacpp import slotfiles
from modelrunner_llamacpp.engines import Engine, EngineKind
from modelrunner_llamacpp.kvcache import Shape
from modelrunner_llamacpp.model_options import LlamaCppOptions
from modelrunner_llamacpp.settings import LlamaCppSettings
from modelrunner_llamacpp.slotfiles import SavedSlot, SlotFiles

log = logging.getLogger(__name__)

# Seconds. A healthy engine lists its slots at once; another one must not delay its own end.
_LOOK_LIMIT = 1.0
# Seconds for all slots of a run; requests that wait for the memory or for the model wait for this too.
_SAVE_LIMIT = _RESTORE_LIMIT = 5.0
# Architectures with sliding layers that their metadata does not mention (llama-model.cpp).
_SLIDING = frozenset({"llama4"})


def can_be_kept(spec: RunSpec, engine: Engine, options: Mapping[str, str]) -> bool:
    """Returns False if a restored state would be useless or harmful. Of a sliding window only the last tokens are kept,
    so the engine would compute the whole prompt again (`--swa-full` keeps all). The cache of what drafts is not in
    the file."""
    metadata, architecture = spec.bundle.header.metadata, spec.bundle.header.architecture
    slides = bool(metadata.get(f"{architecture}.attention.sliding_window")) or architecture in _SLIDING
    return (
        spec.mode is Mode.COMPLETION
        and engine.kind in (EngineKind.NATIVE, EngineKind.WHEEL)
        and spec.draft is None
        and not spec.mtp
        and not spec.bundle.adapters  # each request may give the adapters another strength
        and options.get("--cache-prompt") != "off"
        and (not slides or options.get("--swa-full") == "on")
    )


def key_of(engine: Engine, options: Mapping[str, str]) -> str:
    """Returns a text for everything, apart from the model, that must not have changed: the engine's file and version,
    and every option but the number of sequences, since a sequence is the same beside any number of others. The owner is
    not in it, because nobody knows the owner yet when the engine starts."""
    one = {**options, "--ctx-size": str(Shape.of(options).context)}
    kept = sorted(item for item in one.items() if item[0] not in ("--parallel", "--cache-ram"))
    made_by = [str(engine), str(engine.program), os.stat(engine.program).st_mtime_ns, kept]
    return hashlib.sha256(json.dumps(made_by).encode()).hexdigest()[:32]


def keeper_for(
    files: SlotFiles | None, settings: LlamaCppSettings, spec: RunSpec, engine: Engine, options: dict[str, str]
) -> "SlotKeeper | None":
    """Returns the keeper of a run with these `options` (of args.effective). None if no slots are kept: the settings say
    so, a state would be useless, or there is no folder for it."""
    wanted = settings.slot_cache > 0 and LlamaCppOptions.of(spec.options).save_slots
    if files is None or not wanted or not can_be_kept(spec, engine, options):
        return None
    # Otherwise the engine moves idle slots to its cache in main memory, where they cannot be saved.
    options = {"--cache-idle-slots": "off"} | options
    try:
        folder = files.folder(spec.model_id, key_of(engine, options))
    except OSError as error:
        log.warning("prompt caches of this run are not kept: %s", error)
        return None
    return SlotKeeper(files, folder, options, settings.slot_tokens)


class SlotKeeper:
    """Keeps the slots of one run with these `options`, for one owner. `folder` is for the engine's `--slot-save-path`.
    States of fewer than `least` tokens are not kept."""

    def __init__(self, files: SlotFiles, folder: Path, options: dict[str, str], least: int) -> None:
        self.folder = folder
        self.options = options
        self._files = files
        self._slots = int(options["--parallel"])
        self._least = least

    async def restore(self, endpoint: Endpoint, owner: str) -> None:
        """Restores the owner's most valuable states, one in each slot, the best one in the first slot: for a prompt
        that continues none of them the engine takes the last slot. Raises `OSError`, `ModelRunnerError`."""
        tokens, slot, began = 0, 0, time.monotonic()
        for saved in await asyncio.to_thread(slotfiles.saved_slots, self.folder, owner):
            left = _RESTORE_LIMIT - (time.monotonic() - began)
            if slot == self._slots or left <= 0:
                break
            if await self._restore(endpoint, slot, saved, left):
                slot += 1
                tokens += saved.tokens
        if slot:
            log.info("%d prompt caches restored, %d tokens", slot, tokens)

    async def _restore(self, endpoint: Endpoint, slot: int, saved: SavedSlot, limit: float) -> bool:
        """Restores a state, and returns True on success. It removes a file that the engine does not accept completely,
        but not when the runner is stopped meanwhile."""
        try:
            claimed = await asyncio.to_thread(slotfiles.claim, saved.path)
        except ValueError as error:
            log.warning("a saved prompt cache is damaged and is removed: %s", error)
            return False
        good = False
        try:
            status, answer = await _act(endpoint, slot, "restore", claimed, limit)
            good = status == 200 and answer.get("n_restored") == saved.tokens
            if not good:
                log.warning("a saved prompt cache was not taken by the engine and is removed: %s", answer)
        except asyncio.CancelledError:
            good = True
            raise
        finally:
            if good:
                slotfiles.give_back(claimed)
            else:
                claimed.unlink(missing_ok=True)
        return good

    async def save(self, endpoint: Endpoint, owner: str) -> None:
        """Saves every slot that was used in this run and holds a long prompt, the last used first. `owner` alone must
        have used them. It skips a busy slot, because saving would wait for it. Raises `OSError`, `ModelRunnerError`."""
        _, slots = await ask(endpoint, "GET", "/slots", timeout=_LOOK_LIMIT)
        worth = [slot for slot in slots if isinstance(slot, dict) and self._is_worth_it(slot)]
        now, began, tokens = time.time_ns(), time.monotonic(), 0
        for age, slot in enumerate(sorted(worth, key=lambda slot: int(slot["id_task"]), reverse=True)):
            left = _SAVE_LIMIT - (time.monotonic() - began)
            file = slotfiles.partial(self.folder, owner, now - age)
            if left > 0 and await self._save(endpoint, int(slot["id"]), file, left):
                tokens += int(slot["n_prompt_tokens"])
        if tokens:
            await asyncio.to_thread(self._tidy, owner)
            log.info("prompt caches of %d tokens saved in %.0f ms", tokens, (time.monotonic() - began) * 1000)

    def _is_worth_it(self, slot: Mapping[str, Any]) -> bool:
        """Returns False for a slot that no request has used: it has no `id_task`, and its restored content is still on
        disk."""
        return "id_task" in slot and not slot["is_processing"] and slot.get("n_prompt_tokens", 0) >= self._least

    async def _save(self, endpoint: Endpoint, slot: int, file: Path, limit: float) -> bool:
        try:
            status, answer = await _act(endpoint, slot, "save", file, limit)
            if status == 200:
                await asyncio.to_thread(slotfiles.publish, file)
                return True
            # The disk is full, or there is an image in the prompt and this engine cannot save it.
            log.warning("the engine did not save a prompt cache: %s", answer)
        except TimeoutError:
            log.warning("a prompt cache was not saved within %g seconds", _SAVE_LIMIT)
        finally:
            file.unlink(missing_ok=True)
        return False

    def _tidy(self, owner: str) -> None:
        for saved in slotfiles.superfluous(slotfiles.saved_slots(self.folder, owner), self._slots):
            saved.path.unlink(missing_ok=True)
        self._files.trim()


async def _act(endpoint: Endpoint, slot: int, action: str, file: Path, limit: float) -> tuple[int, dict[str, Any]]:
    body = {"filename": file.name}
    status, answer = await ask(endpoint, "POST", f"/slots/{slot}?action={action}", body, timeout=limit)
    return status, answer if isinstance(answer, dict) else {}
