"""Measures and plots of models of numbers, labels and times, from true values and answers alone."""
