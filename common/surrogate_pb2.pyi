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
    __slots__ = ("schema", "method", "run", "site", "fingerprint", "classes", "frame")
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    schema: int
    method: str
    run: str
    site: str
    fingerprint: str
    classes: _containers.RepeatedScalarFieldContainer[str]
    frame: bytes
    def __init__(self, schema: _Optional[int] = ..., method: _Optional[str] = ..., run: _Optional[str] = ..., site: _Optional[str] = ..., fingerprint: _Optional[str] = ..., classes: _Optional[_Iterable[str]] = ..., frame: _Optional[bytes] = ...) -> None: ...

class Mixtures(_message.Message):
    __slots__ = ("covariance", "counts", "components", "weights", "means", "spread", "levels")
    COVARIANCE_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    MEANS_FIELD_NUMBER: _ClassVar[int]
    SPREAD_FIELD_NUMBER: _ClassVar[int]
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    covariance: str
    counts: _containers.RepeatedScalarFieldContainer[int]
    components: _containers.RepeatedScalarFieldContainer[int]
    weights: Halves
    means: Halves
    spread: _containers.RepeatedCompositeFieldContainer[Halves]
    levels: Levels
    def __init__(self, covariance: _Optional[str] = ..., counts: _Optional[_Iterable[int]] = ..., components: _Optional[_Iterable[int]] = ..., weights: _Optional[_Union[Halves, _Mapping]] = ..., means: _Optional[_Union[Halves, _Mapping]] = ..., spread: _Optional[_Iterable[_Union[Halves, _Mapping]]] = ..., levels: _Optional[_Union[Levels, _Mapping]] = ...) -> None: ...

class Levels(_message.Message):
    __slots__ = ("shape", "bits", "scales", "data")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    BITS_FIELD_NUMBER: _ClassVar[int]
    SCALES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    bits: int
    scales: Halves
    data: bytes
    def __init__(self, shape: _Optional[_Iterable[int]] = ..., bits: _Optional[int] = ..., scales: _Optional[_Union[Halves, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class Sums(_message.Message):
    __slots__ = ("counts", "sums", "squares")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    SQUARES_FIELD_NUMBER: _ClassVar[int]
    counts: Halves
    sums: Halves
    squares: Halves
    def __init__(self, counts: _Optional[_Union[Halves, _Mapping]] = ..., sums: _Optional[_Union[Halves, _Mapping]] = ..., squares: _Optional[_Union[Halves, _Mapping]] = ...) -> None: ...

class Table(_message.Message):
    __slots__ = ("name", "shape", "data")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class Noise(_message.Message):
    __slots__ = ("statistic", "sigma", "sensitivity")
    STATISTIC_FIELD_NUMBER: _ClassVar[int]
    SIGMA_FIELD_NUMBER: _ClassVar[int]
    SENSITIVITY_FIELD_NUMBER: _ClassVar[int]
    statistic: str
    sigma: float
    sensitivity: float
    def __init__(self, statistic: _Optional[str] = ..., sigma: _Optional[float] = ..., sensitivity: _Optional[float] = ...) -> None: ...

class Claim(_message.Message):
    __slots__ = ("mechanism", "epsilon", "delta", "unit", "noise_multiplier", "clip", "noise", "centre")
    MECHANISM_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    NOISE_MULTIPLIER_FIELD_NUMBER: _ClassVar[int]
    CLIP_FIELD_NUMBER: _ClassVar[int]
    NOISE_FIELD_NUMBER: _ClassVar[int]
    CENTRE_FIELD_NUMBER: _ClassVar[int]
    mechanism: str
    epsilon: float
    delta: float
    unit: str
    noise_multiplier: float
    clip: float
    noise: _containers.RepeatedCompositeFieldContainer[Noise]
    centre: str
    def __init__(self, mechanism: _Optional[str] = ..., epsilon: _Optional[float] = ..., delta: _Optional[float] = ..., unit: _Optional[str] = ..., noise_multiplier: _Optional[float] = ..., clip: _Optional[float] = ..., noise: _Optional[_Iterable[_Union[Noise, _Mapping]]] = ..., centre: _Optional[str] = ...) -> None: ...

class Centre(_message.Message):
    __slots__ = ("mean",)
    MEAN_FIELD_NUMBER: _ClassVar[int]
    mean: Halves
    def __init__(self, mean: _Optional[_Union[Halves, _Mapping]] = ...) -> None: ...

class Surrogate(_message.Message):
    __slots__ = ("header", "mixtures", "sums", "claim")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    MIXTURES_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    header: Header
    mixtures: Mixtures
    sums: Sums
    claim: Claim
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., mixtures: _Optional[_Union[Mixtures, _Mapping]] = ..., sums: _Optional[_Union[Sums, _Mapping]] = ..., claim: _Optional[_Union[Claim, _Mapping]] = ...) -> None: ...

class Counts(_message.Message):
    __slots__ = ("header", "tables", "claim")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    header: Header
    tables: _containers.RepeatedCompositeFieldContainer[Table]
    claim: Claim
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., tables: _Optional[_Iterable[_Union[Table, _Mapping]]] = ..., claim: _Optional[_Union[Claim, _Mapping]] = ...) -> None: ...

class Head(_message.Message):
    __slots__ = ("header", "weight", "bias", "clip", "centre", "projection", "target", "without_mean", "mean_over_columns", "own_length", "steady")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    CLIP_FIELD_NUMBER: _ClassVar[int]
    CENTRE_FIELD_NUMBER: _ClassVar[int]
    PROJECTION_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_MEAN_FIELD_NUMBER: _ClassVar[int]
    MEAN_OVER_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    OWN_LENGTH_FIELD_NUMBER: _ClassVar[int]
    STEADY_FIELD_NUMBER: _ClassVar[int]
    header: Header
    weight: Halves
    bias: Halves
    clip: float
    centre: Centre
    projection: Halves
    target: str
    without_mean: bool
    mean_over_columns: float
    own_length: float
    steady: bool
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., weight: _Optional[_Union[Halves, _Mapping]] = ..., bias: _Optional[_Union[Halves, _Mapping]] = ..., clip: _Optional[float] = ..., centre: _Optional[_Union[Centre, _Mapping]] = ..., projection: _Optional[_Union[Halves, _Mapping]] = ..., target: _Optional[str] = ..., without_mean: _Optional[bool] = ..., mean_over_columns: _Optional[float] = ..., own_length: _Optional[float] = ..., steady: _Optional[bool] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("name", "values", "kept", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    values: Halves
    kept: bytes
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., values: _Optional[_Union[Halves, _Mapping]] = ..., kept: _Optional[bytes] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class Parameters(_message.Message):
    __slots__ = ("header", "round", "records", "tensors", "claim")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    header: Header
    round: int
    records: int
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    claim: Claim
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., round: _Optional[int] = ..., records: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., claim: _Optional[_Union[Claim, _Mapping]] = ...) -> None: ...

class Synthetic(_message.Message):
    __slots__ = ("header", "round", "records", "values", "labels", "radius", "claim")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    RADIUS_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    header: Header
    round: int
    records: int
    values: Halves
    labels: _containers.RepeatedScalarFieldContainer[int]
    radius: float
    claim: Claim
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., round: _Optional[int] = ..., records: _Optional[int] = ..., values: _Optional[_Union[Halves, _Mapping]] = ..., labels: _Optional[_Iterable[int]] = ..., radius: _Optional[float] = ..., claim: _Optional[_Union[Claim, _Mapping]] = ...) -> None: ...

class Network(_message.Message):
    __slots__ = ("header", "kind", "inputs", "tensors")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    header: Header
    kind: str
    inputs: int
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., kind: _Optional[str] = ..., inputs: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ...) -> None: ...

class Quadratic(_message.Message):
    __slots__ = ("header", "means", "whiteners", "bias")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    MEANS_FIELD_NUMBER: _ClassVar[int]
    WHITENERS_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    header: Header
    means: Halves
    whiteners: Halves
    bias: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., means: _Optional[_Union[Halves, _Mapping]] = ..., whiteners: _Optional[_Union[Halves, _Mapping]] = ..., bias: _Optional[_Iterable[float]] = ...) -> None: ...

class Heads(_message.Message):
    __slots__ = ("heads", "highest")
    HEADS_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_FIELD_NUMBER: _ClassVar[int]
    heads: _containers.RepeatedCompositeFieldContainer[Head]
    highest: bool
    def __init__(self, heads: _Optional[_Iterable[_Union[Head, _Mapping]]] = ..., highest: _Optional[bool] = ...) -> None: ...

class Classifier(_message.Message):
    __slots__ = ("head", "heads", "network", "quadratic")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    QUADRATIC_FIELD_NUMBER: _ClassVar[int]
    head: Head
    heads: Heads
    network: Network
    quadratic: Quadratic
    def __init__(self, head: _Optional[_Union[Head, _Mapping]] = ..., heads: _Optional[_Union[Heads, _Mapping]] = ..., network: _Optional[_Union[Network, _Mapping]] = ..., quadratic: _Optional[_Union[Quadratic, _Mapping]] = ...) -> None: ...

class Relay(_message.Message):
    __slots__ = ("surrogates",)
    SURROGATES_FIELD_NUMBER: _ClassVar[int]
    surrogates: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, surrogates: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Sealed(_message.Message):
    __slots__ = ("nonce", "content", "readers", "signature")
    class Reader(_message.Message):
        __slots__ = ("name", "nonce", "key")
        NAME_FIELD_NUMBER: _ClassVar[int]
        NONCE_FIELD_NUMBER: _ClassVar[int]
        KEY_FIELD_NUMBER: _ClassVar[int]
        name: str
        nonce: bytes
        key: bytes
        def __init__(self, name: _Optional[str] = ..., nonce: _Optional[bytes] = ..., key: _Optional[bytes] = ...) -> None: ...
    NONCE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    content: bytes
    readers: _containers.RepeatedCompositeFieldContainer[Sealed.Reader]
    signature: bytes
    def __init__(self, nonce: _Optional[bytes] = ..., content: _Optional[bytes] = ..., readers: _Optional[_Iterable[_Union[Sealed.Reader, _Mapping]]] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Bundle(_message.Message):
    __slots__ = ("manifest", "payload", "signature")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    manifest: bytes
    payload: bytes
    signature: bytes
    def __init__(self, manifest: _Optional[bytes] = ..., payload: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class SumMember(_message.Message):
    __slots__ = ("site", "public", "masking", "sharing", "signature")
    SITE_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_FIELD_NUMBER: _ClassVar[int]
    MASKING_FIELD_NUMBER: _ClassVar[int]
    SHARING_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    site: str
    public: bytes
    masking: bytes
    sharing: bytes
    signature: bytes
    def __init__(self, site: _Optional[str] = ..., public: _Optional[bytes] = ..., masking: _Optional[bytes] = ..., sharing: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class SumMembers(_message.Message):
    __slots__ = ("members", "map")
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    MAP_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[SumMember]
    map: bytes
    def __init__(self, members: _Optional[_Iterable[_Union[SumMember, _Mapping]]] = ..., map: _Optional[bytes] = ...) -> None: ...

class SumDealt(_message.Message):
    __slots__ = ("site", "shares", "blind", "masking", "members")
    class Share(_message.Message):
        __slots__ = ("reader", "content", "blind", "masking")
        READER_FIELD_NUMBER: _ClassVar[int]
        CONTENT_FIELD_NUMBER: _ClassVar[int]
        BLIND_FIELD_NUMBER: _ClassVar[int]
        MASKING_FIELD_NUMBER: _ClassVar[int]
        reader: str
        content: bytes
        blind: bytes
        masking: bytes
        def __init__(self, reader: _Optional[str] = ..., content: _Optional[bytes] = ..., blind: _Optional[bytes] = ..., masking: _Optional[bytes] = ...) -> None: ...
    SITE_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    BLIND_FIELD_NUMBER: _ClassVar[int]
    MASKING_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    site: str
    shares: _containers.RepeatedCompositeFieldContainer[SumDealt.Share]
    blind: bytes
    masking: bytes
    members: bytes
    def __init__(self, site: _Optional[str] = ..., shares: _Optional[_Iterable[_Union[SumDealt.Share, _Mapping]]] = ..., blind: _Optional[bytes] = ..., masking: _Optional[bytes] = ..., members: _Optional[bytes] = ...) -> None: ...

class PublicMap(_message.Message):
    __slots__ = ("projection", "centre")
    PROJECTION_FIELD_NUMBER: _ClassVar[int]
    CENTRE_FIELD_NUMBER: _ClassVar[int]
    projection: Halves
    centre: Centre
    def __init__(self, projection: _Optional[_Union[Halves, _Mapping]] = ..., centre: _Optional[_Union[Centre, _Mapping]] = ...) -> None: ...

class SumDelivery(_message.Message):
    __slots__ = ("dealt", "map")
    DEALT_FIELD_NUMBER: _ClassVar[int]
    MAP_FIELD_NUMBER: _ClassVar[int]
    dealt: _containers.RepeatedCompositeFieldContainer[SumDealt]
    map: bytes
    def __init__(self, dealt: _Optional[_Iterable[_Union[SumDealt, _Mapping]]] = ..., map: _Optional[bytes] = ...) -> None: ...

class MaskedSum(_message.Message):
    __slots__ = ("header", "numbers", "claim")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    header: Header
    numbers: bytes
    claim: Claim
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., numbers: _Optional[bytes] = ..., claim: _Optional[_Union[Claim, _Mapping]] = ...) -> None: ...

class SumBytes(_message.Message):
    __slots__ = ("site", "value")
    SITE_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    site: str
    value: bytes
    def __init__(self, site: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class SumList(_message.Message):
    __slots__ = ("summed", "signatures")
    SUMMED_FIELD_NUMBER: _ClassVar[int]
    SIGNATURES_FIELD_NUMBER: _ClassVar[int]
    summed: _containers.RepeatedScalarFieldContainer[str]
    signatures: _containers.RepeatedCompositeFieldContainer[SumBytes]
    def __init__(self, summed: _Optional[_Iterable[str]] = ..., signatures: _Optional[_Iterable[_Union[SumBytes, _Mapping]]] = ...) -> None: ...

class SumRevealed(_message.Message):
    __slots__ = ("blind", "masking", "spare")
    BLIND_FIELD_NUMBER: _ClassVar[int]
    MASKING_FIELD_NUMBER: _ClassVar[int]
    SPARE_FIELD_NUMBER: _ClassVar[int]
    blind: _containers.RepeatedCompositeFieldContainer[SumBytes]
    masking: _containers.RepeatedCompositeFieldContainer[SumBytes]
    spare: bytes
    def __init__(self, blind: _Optional[_Iterable[_Union[SumBytes, _Mapping]]] = ..., masking: _Optional[_Iterable[_Union[SumBytes, _Mapping]]] = ..., spare: _Optional[bytes] = ...) -> None: ...

class SumState(_message.Message):
    __slots__ = ("site", "context", "phase", "masking", "sharing", "blind", "members", "shares", "summed", "map", "spare", "pairs")
    SITE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    MASKING_FIELD_NUMBER: _ClassVar[int]
    SHARING_FIELD_NUMBER: _ClassVar[int]
    BLIND_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    SUMMED_FIELD_NUMBER: _ClassVar[int]
    MAP_FIELD_NUMBER: _ClassVar[int]
    SPARE_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    site: str
    context: bytes
    phase: str
    masking: bytes
    sharing: bytes
    blind: bytes
    members: _containers.RepeatedCompositeFieldContainer[SumMember]
    shares: SumRevealed
    summed: _containers.RepeatedScalarFieldContainer[str]
    map: bytes
    spare: bytes
    pairs: bytes
    def __init__(self, site: _Optional[str] = ..., context: _Optional[bytes] = ..., phase: _Optional[str] = ..., masking: _Optional[bytes] = ..., sharing: _Optional[bytes] = ..., blind: _Optional[bytes] = ..., members: _Optional[_Iterable[_Union[SumMember, _Mapping]]] = ..., shares: _Optional[_Union[SumRevealed, _Mapping]] = ..., summed: _Optional[_Iterable[str]] = ..., map: _Optional[bytes] = ..., spare: _Optional[bytes] = ..., pairs: _Optional[bytes] = ...) -> None: ...

class SumTotal(_message.Message):
    __slots__ = ("header", "sites", "numbers", "claim")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    SITES_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    header: Header
    sites: _containers.RepeatedScalarFieldContainer[str]
    numbers: bytes
    claim: Claim
    def __init__(self, header: _Optional[_Union[Header, _Mapping]] = ..., sites: _Optional[_Iterable[str]] = ..., numbers: _Optional[bytes] = ..., claim: _Optional[_Union[Claim, _Mapping]] = ...) -> None: ...
