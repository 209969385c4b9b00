"""The structs of the control plane's JSON (docs/api.md), shared by server and client. msgspec structs: they check as
they decode, and the command line, which needs them in every command, loads them in a few milliseconds."""

from modelrunner.wire.daemon import *  # noqa: F403  # noqa: F403
from modelrunner.wire.models import *  # noqa: F403
from modelrunner.wire.openai import *  # noqa: F403  # noqa: F403
from modelrunner.wire.runners import *  # noqa: F403  # noqa: F403
