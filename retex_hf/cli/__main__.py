"""Entry point of `python -m retex_hf.cli`, for environments whose scripts are not on the path."""

import sys

from . import main

if __name__ == "__main__":
    sys.exit(main())
