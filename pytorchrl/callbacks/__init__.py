"""Callbacks: code of users that a learner calls on defined events of a run."""

from pytorchrl.callbacks.base import Callback, TrainingRun
from pytorchrl.callbacks.search import OptunaPruning, TuneReport
from pytorchrl.callbacks.shipped import CsvLog, SaveBestModel, StopAtScore, StopOnPlateau
from pytorchrl.callbacks.trackers import MlflowLog, WandbLog

__all__ = [
    "Callback", "CsvLog", "MlflowLog", "OptunaPruning", "SaveBestModel", "StopAtScore", "StopOnPlateau", "TrainingRun",
    "TuneReport", "WandbLog",
]
