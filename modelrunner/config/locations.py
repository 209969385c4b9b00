"""The places of files: data, cache, runtime folder and socket. Every command imports this module, so it is light; the
daemon's other settings are in settings.py."""

import hashlib
import os
import stat
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import platformdirs

from modelrunner.errors import ModelRunnerError

# sun_path holds 108 bytes on Linux and 104 on macOS, with the final NUL. The rest is for temporary names.
MAX_SOCKET_PATH = 100
SOCKET_NAME = "modelrunner.sock"
_ELSEWHERE = "set another place with MODELRUNNER_RUNTIME_DIR"


class ConfigurationError(ModelRunnerError):
    """A setting, or the place for a file, that cannot be used; the message names it."""

    code = "configuration_error"


@dataclass(frozen=True, slots=True)
class Locations:
    """The places of files, as absolute paths; looking them up creates nothing. `runtimes` are folders for sockets, the
    best first: the daemon takes the first that only its user can open. `socket` is its address there; `host` is the
    daemon that the command line talks to, which may be another."""

    data: Path
    cache: Path
    config_file: Path
    runtimes: tuple[Path, ...]
    socket: Path
    host: str
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def find(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Reads the environment, then the configuration file, then uses the platform's folders. Raises
        `ConfigurationError`."""
        dirs = platformdirs.PlatformDirs("modelrunner", appauthor=False)
        read = ConfigFile(Path(), "", {})

        def setting(name: str, default: Path) -> Path:
            variable = f"MODELRUNNER_{name.upper()}"
            try:
                return _absolute(environ.get(variable) or read.table.get(name) or default)
            except ValueError as error:
                is_in_file = not environ.get(variable) and name in read.table
                where = f"{read.place(name)}: {name}" if is_in_file else variable
                raise ConfigurationError(f"{where}: {error}") from None

        config_file = setting("config", dirs.user_config_path / "config.toml")
        read = ConfigFile.read(config_file)
        data = setting("data_dir", dirs.user_data_path)
        defaults = default_runtimes(data)
        runtime = setting("runtime_dir", defaults[0])
        runtimes = defaults if runtime == defaults[0] else (runtime,)
        socket = setting("socket", runtime / SOCKET_NAME)
        host = environ.get("MODELRUNNER_HOST") or read.table.get("host") or f"unix://{socket}"
        return cls(data, setting("cache_dir", dirs.user_cache_path), config_file, runtimes, socket, str(host), environ)

    @property
    def runtime(self) -> Path:
        return self.runtimes[0]

    @property
    def logins(self) -> Path:
        """Returns the file with the passwords of registries."""
        return logins_beside(self.config_file)


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The configuration file: its `text`, and the `table` of its values."""

    path: Path
    text: str
    table: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads the file; a missing file is an empty one. Raises `ConfigurationError` with the line and column."""
        try:
            text = path.read_bytes().decode()  # with the ends of its lines
            return cls(path, text, tomllib.loads(text))
        except FileNotFoundError:
            return cls(path, "", {})
        except (ValueError, RecursionError, OSError) as error:  # also for a number of 5,000 digits
            raise ConfigurationError(f"{path} cannot be read: {error}; correct it or move it away") from error

    def line(self, *key: str) -> int | None:
        """Returns the line of a key, or of the table that it is missing from."""
        place = self._position(key)
        return place[0] if place else None

    def place(self, *key: str) -> str:
        """Returns "/home/me/config.toml, line 3, column 1" for a key, or for the table that it is missing from."""
        place = self._position(key)
        return f"{self.path}, line {place[0]}, column {place[1]}" if place else str(self.path)

    def _position(self, key: Sequence[str]) -> tuple[int, int] | None:
        from modelrunner.config.tomlplaces import place

        return place(self.text, key)


def expanded(path: Path) -> Path:
    """Returns the path with the home folder in place of its tilde. Raises `ValueError` where there is none, and for a
    path that no file can have."""
    if "\0" in str(path):
        raise ValueError(f"{str(path)!r} is not a path: it has a NUL")
    try:
        return path.expanduser()
    except RuntimeError:
        raise ValueError(f"{str(path)!r} has no home folder: set HOME, or write the whole path") from None


def _absolute(path: Any) -> Path:
    """Returns the path in its absolute form. Raises `ValueError` as `expanded`, and for another kind of value."""
    if not isinstance(path, str | Path):
        raise ValueError(f"{path!r} is not a path in quotes")
    return Path(os.path.abspath(expanded(Path(path))))


def whole(path: Path) -> Path:
    """Returns the path in its normal form. Raises `ValueError` as `expanded`, and for one that is not absolute."""
    path = expanded(path)
    if not path.is_absolute():
        raise ValueError(f"{str(path)!r} is not absolute: write the whole path of the folder")
    return Path(os.path.normpath(path))


def logins_beside(config_file: Path) -> Path:
    """Returns the file with the passwords of registries, in docker's format."""
    return config_file.with_name("logins.json")


def default_runtimes(data: Path) -> tuple[Path, ...]:
    """Returns folders of this data directory's own, the best first, whose paths are short enough for a socket: in the
    user's runtime directory (XDG Base Directory Specification), which systemd removes at the logout; in the data
    directory, which may be on a file system without sockets; in the temporary directory, where another user may take
    the name."""
    name = "modelrunner-" + hashlib.sha256(os.fsencode(os.path.realpath(data))).hexdigest()[:8]
    users = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}")
    temporary = f"modelrunner-{os.getuid()}-{name[-8:]}"
    folders = [
        *([users / name] if users.is_absolute() and _is_own(users) else []),
        data / "run",
        Path(tempfile.gettempdir()) / temporary,
        Path("/tmp") / temporary,
    ]
    short = [folder for folder in folders if len(os.fsencode(folder / SOCKET_NAME)) <= MAX_SOCKET_PATH]
    return tuple(dict.fromkeys(short))


def _is_own(folder: Path) -> bool:
    try:
        status = folder.stat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and os.access(folder, os.W_OK | os.X_OK)


def first_private(folders: Sequence[Path]) -> Path:
    """Makes and returns the first of `folders` that no other user can use. Raises the `ConfigurationError` of the first
    if none can be used."""
    faults = []
    for folder in folders:
        try:
            return private_directory(folder)
        except ConfigurationError as error:
            faults.append(error)
    raise faults[0]


def private_directory(path: Path) -> Path:
    """Makes `path` and its missing parents, and checks that it belongs to this user alone: a real directory, owned by
    the user, mode 0700. Raises `ConfigurationError`, for example if another user has made it first."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        status = os.lstat(path)
    except OSError as error:
        raise ConfigurationError(f"the folder {path} cannot be made: {error.strerror}; {_ELSEWHERE}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ConfigurationError(f"{path} is not a folder of yours: remove it, or {_ELSEWHERE}")
    if stat.S_IMODE(status.st_mode) != 0o700:
        path.chmod(0o700)
    return path
