"""Callbacks: user code that a learner calls when certain events occur in a run."""

from pytorchrl.callbacks.base import Callback, TrainingRun
from pytorchrl.callbacks.search import OptunaPruning, TuneReport
from pytorchrl.callbacks.shipped import CsvLog, SaveBestModel, StopAtScore, StopOnPlateau
from pytorchrl.callbacks.trackers import MlflowLog, WandbLog

__all__ = [
    "Callback", "CsvLog", "MlflowLog", "OptunaPruning", "SaveBestModel", "StopAtScore", "StopOnPlateau", "TrainingRun",
    "TuneReport", "WandbLog",
]
