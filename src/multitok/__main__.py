"""``python -m multitok``."""

import sys

from multitok.cli.main import main

sys.exit(main())
