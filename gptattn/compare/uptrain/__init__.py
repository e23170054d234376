"""The report on uptraining: key/value heads merged by several methods, then trained on a little."""
