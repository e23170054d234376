"""The trackers that a run's rows go to beside TensorBoard, each one of Lightning's loggers.

A tracker is one file here and one in `conf/logger`. Only its `open` imports its library and
lightning: the command's checks wait for neither. Start reading at `tracker.py`, the contract;
`feed.py` gives it the rows.
"""
