"""One optimisation step on a plan, and the training run around it."""
