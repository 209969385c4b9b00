"""The commands about disk space."""

import sys

import click

from modelrunner import wire
from modelrunner.cli import output
from modelrunner.cli.client import HttpClient, decode, path
from modelrunner.cli.common_options import json_option, with_client
from modelrunner.cli.times import ago
from modelrunner.units import format_bytes


@click.command()
@json_option
@with_client()
def disk_usage(client: HttpClient, as_json: bool) -> None:
    """Show how much disk models and engines use.

    SHARED shows the bytes of a model that other models use too: all models count them once.
    """
    raw = client.fetch("GET", "/engines/df")
    usage = decode(raw, wire.DiskUsage)
    if as_json:
        output.json(raw)
        return
    rows = [
        (
            "model",
            (m.tags or [m.id])[0],
            format_bytes(m.size),
            format_bytes(m.shared),
            format_bytes(m.reclaimable),
            ago(m.last_used),
        )
        for m in usage.models
    ]
    rows += [("engine", f"{b.name} {b.version}".strip(), format_bytes(b.size), "", "", "") for b in usage.backends]
    rows += [
        ("conversations", b.name, format_bytes(b.state), "", format_bytes(b.state), "")
        for b in usage.backends
        if b.state
    ]
    rows += [
        ("all models", "", format_bytes(usage.models_disk_usage), "", "", ""),
        ("unfinished downloads", "", format_bytes(usage.partial), "", format_bytes(usage.partial), ""),
    ]
    there = [folder for folder in usage.folders if not folder.absent]
    if len(usage.folders) > 1:
        rows += [("folder", f.path, format_bytes(f.size), "", f"{format_bytes(f.free)} free", "") for f in there]
    output.table(("WHAT", "NAME", "SIZE", "SHARED", "RECLAIMABLE", "LAST USED"), rows, expendable=("SHARED",))
    for folder in usage.folders:
        if folder.absent:
            output.note(folder.absent)
    if output.is_terminal(sys.stderr):
        output.note(
            "`modelrunner prune` removes unfinished downloads, with --conversations also saved conversations, with"
            " --unused or --to the least recently used models"
        )


@click.command()
@click.option("--conversations", is_flag=True, help="Remove the saved conversations of all models, too.")
@click.option("--unused", metavar="AGE", help="Remove models that were not used for so long: 30d, 2w, 12h.")
@click.option("--to", metavar="SIZE", help="Remove models, least recently used first, until all have SIZE: 100GB.")
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
@json_option
@with_client()
def prune(
    client: HttpClient, conversations: bool, unused: str | None, to: str | None, dry_run: bool, as_json: bool
) -> None:
    """Remove leftovers of downloads and damage, or unused models.

    Leftovers are unfinished downloads, files that no model uses, and damaged files that were set aside. Without this
    command an unfinished download stays for a week, so that the same pull can continue it. --unused and --to remove
    models and no leftovers; pinned, preloaded and loaded models stay.
    """
    if conversations and dry_run:
        raise click.UsageError("--dry-run does not count conversations: `modelrunner df` shows them")
    route = path("models", "prune", unused=unused, to=to, dry_run="true" if dry_run else None)
    done = client.call("POST", route, wire.PruneResponse, timeout=None)
    for item in () if as_json else done.removed:
        output.say(f"{'Would remove' if dry_run else 'Removed'} {item.kind} {item.name} ({format_bytes(item.size)})")
    freed = done.freed
    if conversations:
        freed += client.call("POST", "/engines/prune", wire.PruneResponse, timeout=None).freed
    text = f"{format_bytes(freed)} {'would be' if dry_run else 'are'} free again"
    output.done(text, as_json, freed=freed, removed=done.removed, dry_run=dry_run)
