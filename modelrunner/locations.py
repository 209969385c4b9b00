"""Where things lie: data, cache, runtime folder and socket. Light, since every command starts with it; the daemon's
other settings are in config.py."""

import hashlib
import os
import stat
import tempfile
import tomllib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import platformdirs

from modelrunner.errors import ModelRunnerError

# sun_path holds 108 bytes on Linux and 104 on macOS, with the final NUL; runners' names need some of the rest.
MAX_SOCKET_PATH = 100
_LONGEST_SOCKET_NAME = len("/modelrunner.sock")


class ConfigurationError(ModelRunnerError):
    """A setting, or the place for a file, that cannot be used; the message names it."""

    code = "configuration_error"


@dataclass(frozen=True, slots=True)
class Locations:
    """Absolute paths; nothing is created by looking. `socket` is where the daemon of this data directory listens;
    `host` is the daemon that the command line talks to, which may be another."""

    data: Path
    cache: Path
    config_file: Path
    runtime: Path
    socket: Path
    host: str
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def find(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """From the environment, then the configuration file, then the platform's folders. Raises
        `ConfigurationError`."""
        dirs = platformdirs.PlatformDirs("modelrunner", appauthor=False)
        config_file = Path(environ.get("MODELRUNNER_CONFIG") or dirs.user_config_path / "config.toml").expanduser()
        file = ConfigFile.read(config_file).table

        def setting(name: str, default: Path) -> Path:
            value = environ.get(f"MODELRUNNER_{name.upper()}") or file.get(name) or default
            return Path(os.path.abspath(Path(value).expanduser()))

        data = setting("data_dir", dirs.user_data_path)
        runtime = setting("runtime_dir", _default_runtime(data, dirs))
        socket = setting("socket", runtime / "modelrunner.sock")
        host = environ.get("MODELRUNNER_HOST") or file.get("host") or f"unix://{socket}"
        return cls(data, setting("cache_dir", dirs.user_cache_path), config_file, runtime, socket, str(host), environ)


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The configuration file: `table` is what `text` says."""

    path: Path
    text: str
    table: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Empty where there is no file. Raises `ConfigurationError` with the line and column."""
        try:
            text = path.read_text("utf-8")
            return cls(path, text, tomllib.loads(text))
        except FileNotFoundError:
            return cls(path, "", {})
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
            raise ConfigurationError(f"{path} cannot be read: {error}; mend it or move it away") from error

    def place(self, *key: str) -> str:
        """ "/home/me/config.toml, line 3, column 1" of a key, or of the table that it is missing from."""
        from modelrunner.tomlplaces import place

        found = place(self.text, key)
        return f"{self.path}, line {found[0]}, column {found[1]}" if found else str(self.path)


def _default_runtime(data: Path, dirs: platformdirs.PlatformDirs) -> Path:
    """A folder of this data directory's own, short enough for a socket path, that everyone finds from the data
    directory alone."""
    name = "modelrunner-" + hashlib.sha256(os.fsencode(os.path.realpath(data))).hexdigest()[:8]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # platformdirs warns where there is no such folder; we have an answer to that
        user_runtime = Path(dirs.user_runtime_dir)
    if user_runtime.is_dir() and os.access(user_runtime, os.W_OK | os.X_OK):
        runtime = user_runtime / name
        if len(os.fsencode(runtime)) + _LONGEST_SOCKET_NAME <= MAX_SOCKET_PATH:
            return runtime
    return Path(tempfile.gettempdir()) / f"modelrunner-{os.getuid()}-{name[-8:]}"


def private_directory(path: Path) -> Path:
    """Makes `path` (and its parents) if need be and proves that it is ours alone: a real directory, owned by us, mode
    0700. Raises `ConfigurationError`: somebody else may have put it there first."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        found = os.lstat(path)
    except OSError as error:
        raise ConfigurationError(f"the folder {path} cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ConfigurationError(f"{path} is not a folder of yours: remove it, or set another place for it")
    if stat.S_IMODE(found.st_mode) != 0o700:
        path.chmod(0o700)
    return path
