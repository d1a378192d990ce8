"""A Space that shows one artifact; also `RETEX_ARTIFACT=FOLDER python app.py` on your own machine."""

from __future__ import annotations

import os

from retex_hf.demo import launch

# The artifact to show, a Hub id or a folder, where the environment does not name one.
ARTIFACT = "your-name/your-retex-model"
# What visitors may click on: texts, each of one or several lines, or lists of image files.
EXAMPLES: list[str] = []

if __name__ == "__main__":
    launch(os.environ.get("RETEX_ARTIFACT", ARTIFACT), examples=EXAMPLES)
