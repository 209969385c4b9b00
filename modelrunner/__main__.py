"""`python -m modelrunner` is the same as the `modelrunner` command."""

import sys

from modelrunner.cli import main

sys.exit(main())
