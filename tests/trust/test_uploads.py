"""Bombs by pixels and posts to every address of the page: the short form of the trial."""

from __future__ import annotations

from pathlib import Path

import pytest
from trust import uploads
from trust.uploads import ANSWERED, CLOSED, OPEN, REFUSED


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the server's memory is read from /proc")
def test_pictures_and_posts_are_refused_or_answered_in_little_memory(tmp_path):
    shown, posted = uploads.run(tmp_path, progress=False)
    assert shown.problems + posted.problems == []
    assert set(shown.outcomes) == {REFUSED, ANSWERED}
    assert shown.outcomes[REFUSED] >= 10 and shown.outcomes[ANSWERED] >= 6
    assert set(posted.outcomes) == {CLOSED, OPEN}
    assert posted.outcomes[CLOSED] >= 100
