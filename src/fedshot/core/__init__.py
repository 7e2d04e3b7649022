"""What everything else stands on: trees of tensors, seeds, errors, files, locks and the machine."""
