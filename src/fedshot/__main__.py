"""`python -m fedshot`, the command line."""

import sys

from fedshot.cli.main import main

sys.exit(main())
