"""Topics of the training program: what only the loop, the optimizer, the data and the logs read."""
