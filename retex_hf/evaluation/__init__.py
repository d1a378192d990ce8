"""Honest evaluation of anything that serves many tasks: mixed streams, three questions, no head given away."""

from .method import Collate, Material, Method, Prediction, TaskData

__all__ = ["Collate", "Material", "Method", "Prediction", "TaskData"]
