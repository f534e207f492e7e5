"""`python -m titan_opd` is `titan-opd`."""

import sys

from titan_opd.cli import main

sys.exit(main())
