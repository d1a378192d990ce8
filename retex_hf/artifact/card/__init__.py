"""The model card: generated from `model_card_template.md`, and updated without changing what a person wrote."""

from .writing import CARD_NAME, FIGURES, FIGURES_FOLDER, write_card

__all__ = ["CARD_NAME", "FIGURES", "FIGURES_FOLDER", "write_card"]
