"""Use a trained run: classify examples or files, calibrate confidence, export the encoder."""

from fedshot.use.calibration import CalibrationWarning
from fedshot.use.classifier import FewShotClassifier

__all__ = ["CalibrationWarning", "FewShotClassifier"]
