"""`python -m cute_flash`."""

import sys

from .cli import main

sys.exit(main())
