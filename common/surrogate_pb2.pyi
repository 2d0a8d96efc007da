from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Halves(_message.Message):
    __slots__ = ("shape", "scale", "logarithm", "data")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    LOGARITHM_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    scale: float
    logarithm: bool
    data: bytes
    def __init__(self, shape: _Optional[_Iterable[int]] = ..., scale: _Optional[float] = ..., logarithm: _Optional[bool] = ..., data: _Optional[bytes] = ...) -> None: ...

class Header(_message.Message):
    __slots__ = ("schema", "method", "run", "site", "fingerprint", "classes")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    schema: int
    method: str
    run: str
    site: str
    fingerprint: str
    classes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, schema: _Optional[int] = ..., method: _Optional[str] = ..., run: _Optional[str] = ..., site: _Optional[str] = ..., fingerprint: _Optional[str] = ..., classes: _Optional[_Iterable[str]] = ...) -> None: ...

class Mixtures(_message.Message):
    __slots__ = ("covariance", "counts", "components", "weights", "means", "spread")
    COVARIANCE_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    MEANS_FIELD_NUMBER: _ClassVar[int]
    SPREAD_FIELD_NUMBER: _ClassVar[int]
    covariance: str
    counts: _containers.RepeatedScalarFieldContainer[int]
    components: _containers.RepeatedScalarFieldContainer[int]
    weights: Halves
    means: Halves
    spread: _containers.RepeatedCompositeFieldContainer[Halves]
    def __init__(self, covariance: _Optional[str] = ..., counts: _Optional[_Iterable[int]] = ..., components: _Optional[_Iterable[int]] = ..., weights: _Optional[_Union[Halves, _Mapping]] = ..., means: _Optional[_Union[Halves, _Mapping]] = ..., spread: _Optional[_Iterable[_Union[Halves, _Mapping]]] = ...) -> None: ...

class Surrogate(_message.Message):
    __slots__ = ("header", "mixtures")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    MIXTURES_FIELD_NUMBER: _ClassVar[int]
    header: Header
    mixtures: Mixtures
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., mixtures: _Optional[_Union[Mixtures, _Mapping]] = ...) -> None: ...

class Head(_message.Message):
    __slots__ = ("header", "weight", "bias")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    header: Header
    weight: Halves
    bias: Halves
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., weight: _Optional[_Union[Halves, _Mapping]] = ..., bias: _Optional[_Union[Halves, _Mapping]] = ...) -> None: ...
