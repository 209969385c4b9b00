"""Devices as the commands show them."""

from collections.abc import Iterator, Sequence
from contextlib import suppress

from modelrunner import wire
from modelrunner.cli import output
from modelrunner.cli.client import HttpClient
from modelrunner.errors import ModelRunnerError
from modelrunner.units import format_bytes


def device_text(device: wire.DeviceStatus) -> str:
    """Returns a line about a device: its name, what engines call it, its memory, and how busy and warm it is."""
    names = ", ".join(f"{name} of {engine}" for engine, name in device.engines.items())
    named = f"{device.name} ({names})" if names else device.name
    if device.fault:
        return f"{named}: not used, {device.fault}"
    free = f"{format_bytes(device.free)} of {format_bytes(device.total)} free"
    return f"{named}: {', '.join([free, *_load(device)])}"


def place_text(runner: wire.RunnerStatus) -> str:
    """Returns where a runner computes: "on box2, device 0, device 1"; "" for this machine's processor."""
    used = [f"device {number}" for number, size in enumerate(runner.memory.estimated.vram) if size]
    return ", ".join([*([f"on {runner.host}"] if runner.host else []), *used])


def running_text(runner: wire.RunnerStatus) -> str:
    """Returns a line about a runner: "ready by llama.cpp, context 8192, 1.2GiB, on device 0"."""
    memory = runner.memory.measured or runner.memory.estimated
    size = format_bytes(memory.ram + sum(memory.vram))
    place = place_text(runner)
    parts = [f"{runner.state} by {runner.backend_name}", f"context {runner.context_size}", size]
    return ", ".join([*parts, *filter(None, [place and f"on {place.removeprefix('on ')}", runner.variant])])


def show_place(client: HttpClient, model: str) -> None:
    """Shows on stderr on which device the model's runners compute; nothing without devices, or if they have ended."""
    with suppress(ModelRunnerError):
        for runner in client.call("GET", "/engines/ps", list[wire.RunnerStatus]):
            if model in (runner.model_name, *runner.models.values()) and (place := place_text(runner)):
                output.note(f"{'place:':<13}{'; '.join(filter(None, [place, runner.variant]))}")


def print_devices(devices: Sequence[wire.DeviceStatus], runners: Sequence[wire.RunnerStatus]) -> None:
    """Prints a table of the devices, and what each of these runners holds of them; nothing without devices."""
    if devices:
        output.say("")
        rows = [_row(number, device, runners) for number, device in enumerate(devices)]
        output.table(("DEVICE", "NAME", "TOTAL", "RUNNERS", "OTHERS", "STATE"), rows, expendable=("NAME",))


def _row(number: int, device: wire.DeviceStatus, runners: Sequence[wire.RunnerStatus]) -> tuple[str, ...]:
    holders = ((each.model_name, _held(each, number)) for each in runners if not each.host)
    held = [f"{name} {format_bytes(size)}" for name, size in holders if size]
    state = f"not used, {device.fault}" if device.fault else ", ".join(_load(device))
    return (str(number), device.name, format_bytes(device.total), ", ".join(held), format_bytes(device.others), state)


def _held(runner: wire.RunnerStatus, number: int) -> int:
    memory = runner.memory
    vram = memory.measured.vram if memory.measured and memory.measured.vram else memory.estimated.vram
    return vram[number] if number < len(vram) else 0


def _load(device: wire.DeviceStatus) -> Iterator[str]:
    if device.utilization is not None:
        yield f"{device.utilization} % busy"
    if device.temperature is not None:
        yield f"{device.temperature} °C"
    if device.hides_processes:
        yield "measured by its free memory"
