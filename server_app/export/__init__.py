"""The learned model in other formats: one graph for inference, a model card."""
