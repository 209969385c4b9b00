"""Runs the `modelrunner` command for `python -m modelrunner`."""

import sys

from modelrunner.cli import main

sys.exit(main())
