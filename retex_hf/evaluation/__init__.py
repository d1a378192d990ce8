"""Evaluation of systems that serve many tasks: mixed streams and three modes, with the head chosen by the method."""

from ..data.datasets import load_inputs, load_task
from ..data.task_data import TaskData
from .method import Collate, Material, Method, Prediction
from .metrics import metric_path
from .report import Report
from .run import Evaluation, TaskScore, evaluate

__all__ = [
    "Collate",
    "Evaluation",
    "Material",
    "Method",
    "Prediction",
    "Report",
    "TaskData",
    "TaskScore",
    "evaluate",
    "load_inputs",
    "load_task",
    "metric_path",
]
