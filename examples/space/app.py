"""A Space that shows one artifact; on your own machine, run `RETEX_ARTIFACT=FOLDER python app.py`."""

from __future__ import annotations

import os

from retex_hf.demo import launch

# The artifact to show, a Hub id or a folder, unless the environment names one.
ARTIFACT = "your-name/your-retex-model"
# Examples that visitors may click on: texts, each of one or several lines, or lists of image files.
EXAMPLES: list[str] = []

if __name__ == "__main__":
    launch(os.environ.get("RETEX_ARTIFACT", ARTIFACT), examples=EXAMPLES)
