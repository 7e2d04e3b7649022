"""The lowest layer: trees of tensors, seeds, errors, files, locks and the machine."""
