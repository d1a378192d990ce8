"""SiM: the experts themselves, chosen by our identifier. The upper reference for routing."""

from __future__ import annotations

from .bodies import Identified
from .static import Individual


class SiM(Identified, Individual):
    """All experts stored whole, the task from our identifier: what it gets wrong, only the identifier gets wrong."""

    name = "SiM"
    # The average can be made of the stored experts.
    held = ("average",)
