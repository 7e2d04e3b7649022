"""`python -m fedshot`, the command line."""

import sys

from fedshot.cli import main

sys.exit(main())
