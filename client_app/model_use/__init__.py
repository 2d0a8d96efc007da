"""The model at work at a hospital: which model is in use, predictions, evaluation, and a model of
the site's own.
"""
