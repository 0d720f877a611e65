"""Callbacks: code of users that a learner calls at fixed moments of a run."""

from pytorchrl.callbacks.base import Callback as Callback
from pytorchrl.callbacks.base import TrainingRun as TrainingRun
from pytorchrl.callbacks.search import OptunaPruning as OptunaPruning
from pytorchrl.callbacks.search import TuneReport as TuneReport
from pytorchrl.callbacks.shipped import CsvLog as CsvLog
from pytorchrl.callbacks.shipped import SaveBestModel as SaveBestModel
from pytorchrl.callbacks.shipped import StopAtScore as StopAtScore
from pytorchrl.callbacks.shipped import StopOnPlateau as StopOnPlateau
from pytorchrl.callbacks.trackers import MlflowLog as MlflowLog
from pytorchrl.callbacks.trackers import WandbLog as WandbLog
