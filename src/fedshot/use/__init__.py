"""Use a trained run: classify examples or files, calibrate confidence, export the encoder."""

from fedshot.use.calibration import Calibration, CalibrationWarning, store, stored
from fedshot.use.classifier import FewShotClassifier
from fedshot.use.confidence import Unknown
from fedshot.use.exporting import export
from fedshot.use.inputs import Inputs
from fedshot.use.measuring import measure
from fedshot.use.trained import TrainedRun

__all__ = [
    "Calibration",
    "CalibrationWarning",
    "FewShotClassifier",
    "Inputs",
    "TrainedRun",
    "Unknown",
    "export",
    "measure",
    "store",
    "stored",
]
