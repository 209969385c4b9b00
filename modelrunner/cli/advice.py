"""The command that helps after an error, by the error's code: for messages that name none themselves."""

from modelrunner.errors import ModelRunnerError

NEXT = {
    "internal_error": "`modelrunner logs` has the details",
    "unauthorized": "set MODELRUNNER_API_KEY to a key that `modelrunner keys create NAME` made",
    "forbidden": "`modelrunner status` shows the Unix socket, where the daemon's owner may do everything",
    "model_not_found": "`modelrunner list` shows the models that are here",
    "backend_not_found": "`modelrunner status` shows the engines",
    "route_not_found": "`modelrunner version` shows whether the daemon has another version",
    "runner_not_found": "`modelrunner ps` shows the runners",
    "key_not_found": "`modelrunner keys ls` shows the keys",
    "request_not_found": "`modelrunner requests` shows the requests",
    "rate_limited": "`modelrunner keys ls` shows the limits of the keys",
    "not_implemented": "`modelrunner status` shows the engines",
    "in_use": "`modelrunner ps` shows the models in use",
    "backend_unavailable": "`modelrunner status` shows the engines",
    "misdirected_request": "`modelrunner ps` shows the runners and their models",
    "unsupported_model": "`modelrunner status` shows the engines",
    "invalid_model": "`modelrunner verify` checks the models that are here",
    "queue_full": "`modelrunner ps` shows the number of waiting requests",
    "engine_failed": "`modelrunner logs MODEL` shows the engine's log",
    "engine_exited": "`modelrunner logs MODEL` shows the engine's log",
    "engine_protocol_error": "`modelrunner logs MODEL` shows the engine's log",
    "backend_faulty": "`modelrunner logs` has the details",
    "out_of_memory": "`modelrunner fit MODEL` shows the memory that it needs",
    "tool_server_failed": "`modelrunner logs` has the details",
    "source_failed": "`modelrunner doctor` looks for the cause on this machine",
    "unavailable": "`modelrunner status` shows the daemon's state",
    "shutting_down": "`modelrunner status` shows the daemon's state",
    "backing_off": "`modelrunner why MODEL` explains it",
    "request_cancelled": "`modelrunner requests` shows the last requests",
    "timed_out": "`modelrunner why MODEL` explains it",
    "insufficient_memory": "`modelrunner fit MODEL` shows the memory that it needs",
    "insufficient_disk": "`modelrunner df` shows the disk space of each model",
    "storage_failed": "`modelrunner doctor` looks for the cause",
    "daemon_unreachable": "`modelrunner doctor` looks for the cause",
    "answer_broken": "`modelrunner logs` has the details",
}
"""The advice for an error's code. Other codes are faults of the request; their advice is the command's help."""


def advised(error: ModelRunnerError, command: str) -> str:
    """Returns the message with a command to go on with. `command` is the one that failed, such as "pull"."""
    if "`modelrunner " in error.message:
        return error.message
    ours = type(error) is ModelRunnerError and "code" not in vars(error)  # the daemon's logs know nothing of it
    return joined(error.message, NEXT.get("" if ours else error.code, f"see `modelrunner {command} --help`"))


def joined(message: str, advice: str) -> str:
    """Returns both as one line; a question keeps its mark."""
    text = message.rstrip(".")
    return f"{text} {advice[:1].upper()}{advice[1:]}" if text.endswith("?") else f"{text}; {advice}"
