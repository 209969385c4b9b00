"""`bench --tune`: has the daemon measure what makes a model faster on this machine, and use it."""

from typing import Any

from modelrunner import wire
from modelrunner.cli import output
from modelrunner.cli.client import HttpClient, path


def tune(client: HttpClient, model: str) -> wire.Tuning:
    """Measures, and sets `tune` to "auto", and `speculative` unless it was chosen. Raises `BadRequest` for a model that
    does not chat, or that has a draft model."""
    output.note("measuring takes minutes; `modelrunner events` shows its end")
    shown = client.call("GET", path("models", model), dict[str, Any])
    model = next(iter(shown.get("tags") or ()), model)  # a change takes a whole name
    done = client.call("POST", "/engines/tune", wire.Tuning, {"model": model}, timeout=None)
    [before, *_] = client.call("GET", path("engines", "_configure", model=model), list[dict[str, Any]]) or [{}]
    wanted = {"tune": "auto"}
    if not (before.get("effective") or {}).get("speculative"):
        wanted["speculative"] = "auto"
    client.fetch("POST", "/engines/_configure", {"model": model, **wanted})
    return done


def show(model: str, done: wire.Tuning) -> None:
    rows = [
        (trial.what, text.text, f"{text.plain:.1f}", f"{text.changed:.1f}", f"{text.ratio:.2f}")
        for trial in done.trials
        for text in trial.texts
    ]
    rows += [(trial.what, f"it does not start: {trial.fault}", "", "", "") for trial in done.trials if trial.fault]
    output.table(("CHANGE", "TEXT", "T/S", "WITH IT", "RATIO"), rows)
    output.note(f"{done.reason}; it holds from the next load, and `modelrunner configure {model}` shows the settings")
