"""`python -m retex_hf.cli`, which is also what `accelerate launch -m` takes."""

import sys

from . import main

if __name__ == "__main__":
    sys.exit(main())
