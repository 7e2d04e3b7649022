"""The published class splits of few-shot image sets, as JSON lists of class names."""
