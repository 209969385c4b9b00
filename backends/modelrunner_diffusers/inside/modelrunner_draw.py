"""Serves one diffusion model by OpenAI's API of images, on a Unix socket. It is the child process of a runner, in the
engine's own environment, where modelrunner is not installed."""

import sys

if __name__ == "__main__":
    print("importing diffusers", file=sys.stderr, flush=True)

import asyncio
import base64
import copy
import inspect
import io
import json
import math
import re
import secrets
import time
import traceback
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import diffusers
import torch
from modelrunner_edits import FILES, parts, source
from modelrunner_http import (
    Job,
    Refused,
    Server,
    Stopped,
    chosen,
    event,
    failure,
    fault,
    json_body,
    left,
    settings,
    whole_body,
)
from PIL import Image
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

_LONGEST_PROMPT = 4000  # characters, as OpenAI's
_LONGEST_FORM = 32 << 20  # bytes
_LONGEST_TEXT = 64 << 10  # bytes of a part that is no picture
_MOST_PICTURES = 10
_MOST_STEPS = 150
_MOST_GUIDANCE = 50
_MOST_SEED = 1 << 63
_MOST_PARTIAL = 3
_UNIT, _SMALLEST = 8, 64
"""Pixels: each side is a multiple of the first, and not below the second."""
_FORMS = ("png", "jpeg", "webp")
_QUALITY = 95
_STRENGTH = 0.8
"""How far a picture may go from the one that it begins with, where a request does not say; the default of diffusers."""
_EDITORS = {
    "StableDiffusionPipeline": ("StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline"),
    "StableDiffusionXLPipeline": ("StableDiffusionXLImg2ImgPipeline", "StableDiffusionXLInpaintPipeline"),
    "LatentConsistencyModelPipeline": ("LatentConsistencyModelImg2ImgPipeline", ""),
}
"""The pipelines with the same parts that begin with a picture, and that draw within a mask."""
_NO_TEXTS = frozenset(
    {"n", "seed", "steps", "guidance_scale", "strength", "output_compression", "stream", "partial_images"}
)
"""The parts of a form that are numbers or truth values."""
_SIZE = re.compile(r"([0-9]{1,10})x([0-9]{1,10})")
Tell = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Task:
    """A checked request."""

    prompt: str
    negative: str | None
    n: int
    width: int
    height: int
    seed: int
    steps: int | None
    guidance: float | None
    form: str
    quality: int
    is_events: bool
    partial: int
    is_url: bool
    strength: float = 1.0
    picture: Any = None
    """The picture that it begins with, of the asked size; None for noise."""
    mask: Any = None
    """White where is drawn; None for everywhere."""

    @property
    def name(self) -> str:
        """The beginning of its events."""
        return "image_generation" if self.picture is None else "image_edit"


class Drawing(Job):
    """The work on one request. It stops between two steps. `step` counts those of all its pictures."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task
        self.step = 0
        self.left_at = 0

    def stop(self) -> None:
        if not self.stopped.is_set():
            self.left_at = self.step
        super().stop()


class Painter:
    """The model. Its methods may be called by several threads."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        self._pipeline: Any = diffusers.DiffusionPipeline.from_pretrained(
            settings["model"], local_files_only=True, use_safetensors=True, torch_dtype=torch.float32
        )
        self._pipeline.set_progress_bar_config(disable=True)
        self._editor = cache(self._made_editor)
        self._takes = set(inspect.signature(self._pipeline.__call__).parameters)
        self._steps: int | None = settings["steps"]
        self._largest: int = settings["largest"]
        self._side: int = min(settings["side"], self._largest)
        self._unit = math.lcm(_UNIT, int(self._pipeline.vae_scale_factor))

    def draw(self, job: Drawing, tell: Tell) -> None:
        """Calls `tell` with an event for each step, and for each picture. Raises `Stopped`, `Refused`."""
        task = job.task
        for index in range(task.n):
            pipeline = copy.copy(self._pipeline if task.picture is None else self._editor(task.mask is not None))
            scheduler = pipeline.scheduler
            pipeline.scheduler = type(scheduler).from_config(scheduler.config)  # it counts the steps of one picture

            def stepped(
                result: Any, step: int, moment: Any, kept: dict[str, Any], *, index: int = index
            ) -> dict[str, Any]:
                job.step += 1
                job.check()
                total = int(result.num_timesteps)
                tell({"type": "progress", "index": index, "step": step + 1, "steps": total})
                if partial := _partial(step, total, task.partial):
                    picture = _encoded(self._seen(kept["latents"]), task)
                    tell({"type": "partial_image", "partial_image_index": partial - 1, "b64_json": picture})
                    job.check()
                return {}

            job.check()
            # One picture at a time: each needs the memory of one, and is the same whatever `n` is.
            generator = torch.Generator().manual_seed((task.seed + index) % _MOST_SEED)
            try:
                result = pipeline(generator=generator, callback_on_step_end=stepped, **self._arguments(task))
            except ValueError as error:
                if task.picture is None:
                    raise
                raise Refused(f"the model does not draw so, with this `strength` and `steps`: {error}"[:400]) from None
            if any(getattr(result, "nsfw_content_detected", None) or ()):
                raise Refused("the model's own check withheld the picture: change the prompt or the seed", "prompt")
            seed = (task.seed + index) % _MOST_SEED
            picture = result.images[0]
            if task.mask is not None:
                picture = Image.composite(picture, task.picture, task.mask)  # the rest stays as it was, to the pixel
            tell({"type": "completed", "b64_json": _encoded(picture, task), "seed": seed})

    def _made_editor(self, masked: bool) -> Any:
        """Returns a pipeline of the same parts, for edits. Raises `Refused`."""
        name = _EDITORS[type(self._pipeline).__name__][masked]
        if not name:
            raise Refused("this model draws on whole pictures alone: leave out `mask`, and transparent pixels", "mask")
        editor = getattr(diffusers, name).from_pipe(self._pipeline)
        editor.set_progress_bar_config(disable=True)
        return editor

    def _arguments(self, task: Task) -> dict[str, Any]:
        named = {
            "negative_prompt": task.negative,
            "num_inference_steps": task.steps or self._steps,
            "guidance_scale": task.guidance,
        }
        arguments = {name: value for name, value in named.items() if value is not None}
        arguments |= {"prompt": task.prompt, "output_type": "pil"}
        if task.picture is None:
            return arguments | {"width": task.width, "height": task.height}
        # Of the steps, those are computed that the strength leaves: one at least.
        default = inspect.signature(self._editor(task.mask is not None).__call__).parameters["num_inference_steps"]
        steps = max(arguments.get("num_inference_steps", default.default), math.ceil(1 / task.strength))
        arguments |= {"image": task.picture, "strength": task.strength, "num_inference_steps": steps}
        masked = {"mask_image": task.mask, "width": task.width, "height": task.height}
        return arguments | (masked if task.mask is not None else {})

    def _seen(self, latents: Any) -> Any:
        """Returns what is there of a picture."""
        vae = self._pipeline.vae
        with torch.no_grad():
            decoded = vae.decode(latents.to(vae.dtype) / vae.config.scaling_factor, return_dict=False)[0]
        return self._pipeline.image_processor.postprocess(decoded, output_type="pil")[0]

    def read_form(self, content_type: str, body: bytes, varies: bool) -> Task:
        """Returns the checked request of an edit, or of a variation, which has no prompt. Raises `Refused`."""
        form = parts(content_type, body)
        picture, mask = source(form)
        fields = {name: _typed(name, values) for name, values in form.items() if name not in FILES}
        if varies:
            fields["prompt"], mask = "a picture", None
        if fields.get("size", "auto") == "auto":
            fields["size"] = self._fitting(picture.width, picture.height)
        strength = fields.get("strength", _STRENGTH)
        if type(strength) not in (int, float) or not 0.01 <= strength <= 1:
            raise Refused("`strength` must be a number from 0.01 to 1", "strength")
        task = self.read(fields)
        size = (task.width, task.height)
        task = replace(task, strength=round(float(strength), 2), picture=picture.resize(size))
        if mask is not None:
            self._editor(True)
            task = replace(task, mask=mask.resize(size, Image.Resampling.NEAREST))
        return task

    def _fitting(self, width: int, height: int) -> str:
        """Returns a size near the picture's own that can be drawn."""
        part = min(1.0, self._largest / math.sqrt(width * height))
        return "x".join(str(max(_SMALLEST, int(side * part) // self._unit * self._unit)) for side in (width, height))

    def read(self, fields: dict[str, Any]) -> Task:
        """Returns the checked request. Raises `Refused`."""
        fields = {name: value for name, value in fields.items() if value is not None}
        prompt, negative = _text(fields, "prompt"), fields.get("negative_prompt") and _text(fields, "negative_prompt")
        if not prompt:
            raise Refused("`prompt` must be a text", "prompt")
        if negative and "negative_prompt" not in self._takes:
            raise Refused("this model takes no negative prompt", "negative_prompt")
        if (stream := fields.get("stream", False)) not in (True, False):
            raise Refused("`stream` must be true or false", "stream")
        width, height = self._size(fields.get("size", "auto"))
        guidance = fields.get("guidance_scale")
        if guidance is not None and (
            isinstance(guidance, bool) or not isinstance(guidance, int | float) or not 0 <= guidance <= _MOST_GUIDANCE
        ):
            raise Refused(f"`guidance_scale` must be a number from 0 to {_MOST_GUIDANCE}", "guidance_scale")
        return Task(
            prompt,
            negative or None,
            _whole(fields, "n", 1, _MOST_PICTURES, 1),
            width,
            height,
            _whole(fields, "seed", 0, _MOST_SEED - 1, secrets.randbelow(1 << 32)),
            _whole(fields, "steps", 1, _MOST_STEPS, 0) or None,
            guidance,
            chosen(fields, "output_format", _FORMS),
            _whole(fields, "output_compression", 0, 100, _QUALITY),
            bool(stream),
            _whole(fields, "partial_images", 0, _MOST_PARTIAL, 0),
            chosen(fields, "response_format", ("b64_json", "url")) == "url",
        )

    def _size(self, size: Any) -> tuple[int, int]:
        if size == "auto":
            return self._side, self._side
        match = _SIZE.fullmatch(size) if isinstance(size, str) else None
        if match is None:
            raise Refused("`size` must be WIDTHxHEIGHT in pixels, such as 512x512, or auto", "size")
        width, height = int(match[1]), int(match[2])
        if min(width, height) < _SMALLEST or width % self._unit or height % self._unit:
            raise Refused(
                f"the sides of `size` must be multiples of {self._unit}, of {_SMALLEST} pixels at least", "size"
            )
        if width * height > self._largest**2:
            shrunk = [self._shrunk(side, width * height) for side in (width, height)]
            fitting = f"{shrunk[0]}x{shrunk[1]}" if min(shrunk) >= _SMALLEST else f"{self._largest}x{self._largest}"
            raise Refused(
                f"{width}x{height} does not fit into the memory that is set aside for this model: {fitting} is the "
                "largest size that does in this shape; `largest` in the model's diffusers settings changes it",
                "size",
            )
        return width, height

    def _shrunk(self, side: int, pixels: int) -> int:
        return int(side * self._largest / math.sqrt(pixels)) // self._unit * self._unit


def _partial(step: int, steps: int, wanted: int) -> int:
    """Returns the number of the partial picture, from 1 on, that is due after a step; 0 for none. They are evenly
    spread, and none comes after the last step."""
    due = [round(steps * number / (wanted + 1)) - 1 for number in range(1, wanted + 1)]
    return due.index(step) + 1 if step in due and step < steps - 1 else 0


def _encoded(picture: Any, task: Task) -> str:
    data = io.BytesIO()
    picture.save(data, task.form.upper(), **({} if task.form == "png" else {"quality": task.quality}))
    return base64.b64encode(data.getvalue()).decode()


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value.strip():
        raise Refused(f"`{name}` must be a text that says something", name)
    if len(value) > _LONGEST_PROMPT:
        raise Refused(f"`{name}` has {len(value)} characters: send at most {_LONGEST_PROMPT}", name)
    return value


def _typed(name: str, values: list[bytes]) -> Any:
    """Returns the value of a form's part as it would stand in JSON. Raises `Refused`."""
    if len(values) > 1 or len(values[0]) > _LONGEST_TEXT:
        raise Refused(f"`{name}` must be given once, in {_LONGEST_TEXT} bytes at most", name)
    try:
        text = values[0].decode()
        return json.loads(text) if name in _NO_TEXTS else text
    except (ValueError, RecursionError):
        return values[0].decode("utf-8", "replace")


def _whole(fields: dict[str, Any], name: str, least: int, most: int, default: int) -> int:
    value = fields.get(name, default)
    if name in fields and (type(value) is not int or not least <= value <= most):
        raise Refused(f"`{name}` must be a whole number from {least} to {most}", name)
    return int(value)


class PictureServer(Server):
    """The server. `sequences` requests are worked on at once."""

    def __init__(self, painter: Painter, sequences: int) -> None:
        calls = {
            "/v1/images/generations": self._draw,
            "/v1/images/edits": self._edit,
            "/v1/images/variations": self._vary,
        }
        super().__init__(sequences, calls)
        self._painter = painter

    async def _draw(self, request: Request) -> Response:
        return await self._answered(request, self._painter.read(await json_body(request)))

    async def _edit(self, request: Request) -> Response:
        return await self._from_picture(request, False)

    async def _vary(self, request: Request) -> Response:
        return await self._from_picture(request, True)

    async def _from_picture(self, request: Request, varies: bool) -> Response:
        body = await whole_body(request, _LONGEST_FORM)
        kind = request.headers.get("content-type", "")
        return await self._answered(request, await asyncio.to_thread(self._painter.read_form, kind, body, varies))

    async def _answered(self, request: Request, task: Task) -> Response:
        job = Drawing(task)
        queue = self._begin(job)
        if job.task.is_events:
            return StreamingResponse(_events(job, queue), media_type="text/event-stream")
        leaving = asyncio.create_task(left(request, job))
        try:
            return await _answer(job, queue)
        finally:
            leaving.cancel()

    def _begin(self, job: Drawing) -> "asyncio.Queue[dict[str, Any] | None]":
        """Starts the work, and returns the queue of its events, which ends with None."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any] | None]()
        self.begin(job)

        def tell(event: dict[str, Any] | None) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, event)

        def work() -> None:
            try:
                self._painter.draw(job, tell)
            except Stopped:
                print(f"a client left after step {job.left_at}: stopped after {job.step}", file=sys.stderr, flush=True)
            except Exception as error:
                if not isinstance(error, Refused):
                    traceback.print_exc()
                tell({"type": "error", "error": fault(error)})
            finally:
                tell(None)
                loop.call_soon_threadsafe(self.end, job)

        self.pool.submit(work)
        return queue


async def _answer(job: Drawing, queue: "asyncio.Queue[dict[str, Any] | None]") -> Response:
    """Returns all pictures in one answer."""
    task, pictures = job.task, []
    while (event := await queue.get()) is not None:
        if event["type"] == "error":
            status = 400 if event["error"]["code"] == "bad_request" else 500
            return failure(status, event["error"])
        if event["type"] == "completed":
            data = event["b64_json"]
            named = {"url": f"data:image/{task.form};base64,{data}"} if task.is_url else {"b64_json": data}
            pictures.append({**named, "seed": event["seed"]})
    if job.stopped.is_set():
        return Response(status_code=499)
    size = f"{task.width}x{task.height}"
    answer = {"created": int(time.time()), "data": pictures, "size": size, "output_format": task.form}
    return Response(json.dumps(answer), media_type="application/json")


async def _events(job: Drawing, queue: "asyncio.Queue[dict[str, Any] | None]") -> AsyncIterator[bytes]:
    """Yields OpenAI's events of images, and one for each step."""
    task = job.task
    size = {"size": f"{task.width}x{task.height}", "output_format": task.form}
    try:
        while (image_event := await queue.get()) is not None:
            if image_event["type"] != "error":
                image_event = (
                    image_event | {"type": f"{task.name}.{image_event['type']}", "created_at": int(time.time())} | size
                )
            yield event(image_event)
    finally:
        job.stop()


def main() -> None:
    """Loads the model, then serves until a signal comes."""
    values = settings()
    print("loading the model", file=sys.stderr, flush=True)
    PictureServer(Painter(values), values["sequences"]).serve(values["socket"])


if __name__ == "__main__":
    main()
