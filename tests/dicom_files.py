"""DICOM files for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import DigitalXRayImageStorageForPresentation, ExplicitVRLittleEndian, generate_uid

Array = np.ndarray[Any, np.dtype[Any]]


def header(**tags: Any) -> Dataset:
    """The tags of every DICOM file, and these tags; None leaves a tag out."""
    dataset = Dataset()
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset.SOPClassUID = DigitalXRayImageStorageForPresentation
    dataset.SOPInstanceUID, dataset.StudyInstanceUID = generate_uid(), generate_uid()
    dataset.PatientName, dataset.PatientID = "Doe^Jane", "P1"
    for name, value in tags.items():
        if value is None:
            delattr(dataset, name)
        else:
            setattr(dataset, name, value)
    return dataset


def image(pixels: Array, **tags: Any) -> Dataset:
    """A DICOM image; by default its bits stored are those of the array's type."""
    frames, colour = (
        pixels.ndim == 4 or (pixels.ndim == 3 and pixels.shape[2] != 3),
        pixels.shape[-1] == 3,
    )
    dataset = header()
    dataset.Rows, dataset.Columns = pixels.shape[1:3] if frames else pixels.shape[:2]
    if frames:
        dataset.NumberOfFrames = len(pixels)
    dataset.SamplesPerPixel = 3 if colour else 1
    dataset.PhotometricInterpretation = "RGB" if colour else "MONOCHROME2"
    if colour:
        dataset.PlanarConfiguration = 0
    dataset.BitsAllocated = dataset.BitsStored = 8 * pixels.dtype.itemsize
    dataset.PixelRepresentation = int(pixels.dtype.kind == "i")
    dataset.PixelData = pixels.tobytes()
    for name, value in tags.items():
        if value is None:
            delattr(dataset, name)
        else:
            setattr(dataset, name, value)
    dataset.HighBit = dataset.BitsStored - 1
    return dataset


def save(path: Path, dataset: Dataset) -> Path:
    """Write a complete file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    dataset.save_as(path, enforce_file_format=True)
    return path


def lookup(values: Array, first: int = 0) -> Dataset:
    """An item of a modality or VOI LUT sequence."""
    item = Dataset()
    item.add_new(
        "LUTDescriptor",
        "SS" if first < 0 else "US",
        [len(values), first, 8 * values.dtype.itemsize],
    )
    item.add_new("LUTData", "OW", values.astype(np.uint16).tobytes())
    return item
