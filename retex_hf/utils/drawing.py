"""Access to matplotlib, which is an optional dependency: it is imported when something is drawn, not before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import RetexError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NEEDS_MATPLOTLIB = "Drawing needs matplotlib: pip install 'retex-hf[plots]'."


def can_draw() -> bool:
    """Return whether matplotlib can be imported."""
    try:
        require_matplotlib()
    except RetexError:
        return False
    return True


def require_matplotlib() -> None:
    """Refuse to draw if matplotlib cannot be imported."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise RetexError(NEEDS_MATPLOTLIB) from error


def new_figure(**options: Any) -> Figure:
    """Create an empty figure, without pyplot; `options` are those of matplotlib's `Figure`."""
    require_matplotlib()
    from matplotlib.figure import Figure

    return Figure(**options)
