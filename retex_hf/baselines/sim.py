"""SiM: the experts themselves, chosen by our identifier. The upper bound for routing."""

from __future__ import annotations

from .bodies import Identified
from .static import Individual


class SiM(Identified, Individual):
    """All experts stored whole, with the task chosen by our identifier: its loss is that of identification alone."""

    name = "SiM"
    # The average can be computed from the stored experts.
    held = ("average",)
