"""The training program: arguments, set-up, the loop and what it reports (layer L8)."""
