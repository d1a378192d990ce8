"""`python -m retex_hf.cli`, which is also what `accelerate launch -m` takes."""

import sys

from . import main

sys.exit(main())
