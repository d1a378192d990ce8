"""The model card: written from `model_card_template.md`, updated without touching what a person wrote."""

from .writing import CARD_NAME, FIGURES, FIGURES_FOLDER, write_card

__all__ = ["CARD_NAME", "FIGURES", "FIGURES_FOLDER", "write_card"]
