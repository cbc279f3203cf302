"""Sources of samples: a length, and a function that reads samples by their numbers."""
