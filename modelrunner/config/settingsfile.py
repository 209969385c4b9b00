"""The settings of the configuration file that may be changed from afar. They name no program, folder or address, so
whoever may change them gets no further than who may unload and remove models, and shut the daemon down."""

import json
import re
import tomllib
from collections.abc import Mapping

from modelrunner import durable
from modelrunner.config.locations import ConfigFile, ConfigurationError
from modelrunner.config.settings import Settings
from modelrunner.errors import BadRequest

EDITABLE = (
    *("keep_alive", "memory_budget", "memory_reserve", "max_queue", "max_wait", "max_seconds", "models_quota"),
    *("download_rate", "verify_every", "telemetry", "log_level", "access_log"),
)
_RAW = re.compile(r"true|false|-?(?:0|[1-9][0-9]{0,17})")  # the same in TOML and JSON, as a quoted text is
_TABLE = re.compile(r"(?<![ \t\r\n])(?:\A|[ \t]*\r?\n)([ \t\r\n]*\[)")  # tried once for each run of blank lines


class SettingsFile:
    """The file of `settings`, which are those of the daemon's start. The methods use the disk."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def shown(self) -> dict[str, tuple[str, str]]:
        """Returns the text of each setting, as the file or the environment has it now, "" for the default, and its
        source: "default", a variable, or a line of the file. Raises `BadRequest` for a wrong file."""
        try:
            settings = self._settings.reread()
        except ConfigurationError as error:
            raise BadRequest(error.message) from error
        shown = {}
        for name in EDITABLE:
            source, value = settings.source(name)
            text = str(value).lower() if isinstance(value, bool) else str(value)
            shown[name] = ("" if value is None else text, source)
        return shown

    def write(self, values: Mapping[str, str]) -> str | None:
        """Writes texts by the names of settings, "" for the default, and returns the file's text before, None without a
        file. Raises `BadRequest` for another setting, one that a variable sets, and a file that cannot be changed so,
        `StorageFailed` and `InsufficientDisk`."""
        shown = self.shown()
        for name in values:
            if name not in shown:
                raise BadRequest(f"{name} cannot be set here: {', '.join(EDITABLE)} can", param="values")
            if (source := shown[name][1]).startswith("MODELRUNNER_"):
                raise BadRequest(f"{name} is set by {source}, which goes before the file", param=name)
        path = self._settings.config
        before, existed = ConfigFile.read(path).text, path.exists()
        text = with_values(before, values)
        with durable.translated("writing the configuration file", path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._replace(text)
        return before if existed else None

    def put_back(self, before: str | None) -> None:
        """Undoes `write`."""
        if before is None:
            self._settings.config.resolve().unlink(missing_ok=True)
        else:
            self._replace(before)

    def _replace(self, text: str) -> None:
        """A link stays, as to a folder of configurations, and so does who may read the file."""
        path = self._settings.config.resolve()
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
        durable.write(path, text.encode(), mode=mode)


def with_values(text: str, values: Mapping[str, str]) -> str:
    """Returns the text of a TOML file with other values of top-level settings, "" for none; the rest stays as it is.
    Raises `BadRequest` where they are not written on a line each."""
    first = _TABLE.search(text)
    top, rest = (text[: first.start(1)], text[first.start(1) :]) if first else (text, "")
    wanted, end = dict(tomllib.loads(text)), "\r\n" if "\r\n" in text else "\n"
    for name, value in values.items():
        top = re.sub(rf"^[ \t]*{name}[ \t]*=.*(\n|$)", "", top, flags=re.MULTILINE)
        wanted.pop(name, None)
        if value:
            text_of = json.dumps(value, ensure_ascii=False).replace(
                "\x7f", "\\u007f"
            )  # TOML takes no pair of surrogates
            written = value if _RAW.fullmatch(value) else text_of
            top += "" if not top or top.endswith("\n") else end
            top += f"{name} = {written}{end}"
            wanted[name] = json.loads(written)
    try:
        parsed = tomllib.loads(top + rest)
    except tomllib.TOMLDecodeError:
        parsed = {}
    if parsed != wanted:
        raise BadRequest("config.toml has these settings on more than one line each: change them there")
    return top + rest
