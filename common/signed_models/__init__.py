"""The learned model of a run as one signed file, `model.fedsurrogate`, which every used site keeps."""
