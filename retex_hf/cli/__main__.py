"""`python -m retex_hf.cli`, where scripts of the environment are not on the path."""

import sys

from . import main

if __name__ == "__main__":
    sys.exit(main())
