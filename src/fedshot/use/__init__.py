"""Use a trained run: classify examples or files, calibrate confidence, export the encoder."""
