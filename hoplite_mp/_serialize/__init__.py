"""Writes values as payloads (the bytes of objects), and reads them without a copy.

docs/architecture.md shows the layout ("Payload of an object"). This package never copies large
data, and must not depend on the store, tasks or nodes. This file only exports names for other
packages. The modules:

    layout         the positions in a payload; copies for readers that may write
    values         any value: the choice of a kind of payload
    arrays         one array or number, without pickle
    calls          the function and the arguments of a task
    contributions  the values that ranks pass to Group calls
    errors         failures
    streams        pickle streams inside payloads
    picklers       the picklers that write the streams
    reducers       reductions of objects by class
    reading        the functions used in streams, and their state
    code           functions and classes by name or by value
    by_value       functions by value
    captured_globals  which globals of such functions are sent and written
    classes        classes by value
    sources        source text of functions by value
    mains          the `__main__` of a worker
    out_of_band    arrays as objects beside a stream
    tensors        torch tensors
"""

from __future__ import annotations

from hoplite_mp._common.reduction import (
    Array,
    dtype_name,
    named_dtype,
    raw_bytes,
)
from hoplite_mp._serialize.arrays import (
    describe_array,
    encode_array_head,
    read_contributors,
)
from hoplite_mp._serialize.calls import (
    EncodedCall,
    decode_call,
    decode_function,
    decode_with_carried,
    encode_call,
    encode_function,
    encode_out_of_band,
    function_name,
    read_dependencies,
)
from hoplite_mp._serialize.captured_globals import (
    BroughtGlobals,
    Run,
    Scan,
    begin_run,
    digest,
    end_run,
)
from hoplite_mp._serialize.code import (
    set_readers_path,
)
from hoplite_mp._serialize.errors import (
    RemoteTraceback,
    decode_error,
    drop_traceback,
    encode_error,
    encode_short_error,
    error_name,
    error_text,
    exit_error,
    format_error,
    get_traceback,
    portable_error,
    short_error,
    with_text,
)
from hoplite_mp._serialize.layout import (
    ARGS_ONLY,
    ARRAY,
    ARRAY_META,
    BUFFER,
    BUFFER_ALIGN,
    BYTES,
    ERROR,
    ERROR_META,
    HAS_CONTRIBUTORS,
    HEAD,
    META_BYTES_MAX,
    MUTABLE,
    NUMBER,
    NUMBER_ALIGN,
    NUMPY_SCALAR,
    PICKLE,
    PLAIN,
    PY_BOOL,
    PY_COMPLEX,
    PY_FLOAT,
    PY_INT,
    PY_NONE,
    REF_BYTES,
    REFS_AT,
    ArrayInfo,
    Encoded,
    large_copies,
    payload_kind,
    read_refs,
)
from hoplite_mp._serialize.mains import (
    begin as begin_main,
)
from hoplite_mp._serialize.mains import (
    refuse_in_children,
    turn_to_output_owner,
)
from hoplite_mp._serialize.out_of_band import (
    Lender,
    fetching,
)
from hoplite_mp._serialize.reducers import (
    is_bytes_alone,
    register_future_type,
    register_pickle_by_value,
)
from hoplite_mp._serialize.streams import (
    EXITS,
    PLAIN_ITEMS_MAX,
    MakeRef,
    NotPicklable,
    ResolveRef,
    cause_of,
    failure_within,
    reworded,
    text_of,
)
from hoplite_mp._serialize.values import (
    Folded,
    decode,
    encode,
)

__all__ = [
    "ARGS_ONLY",
    "ARRAY",
    "ARRAY_META",
    "BUFFER",
    "BUFFER_ALIGN",
    "BYTES",
    "ERROR",
    "ERROR_META",
    "EXITS",
    "HAS_CONTRIBUTORS",
    "HEAD",
    "META_BYTES_MAX",
    "MUTABLE",
    "NUMBER",
    "NUMBER_ALIGN",
    "NUMPY_SCALAR",
    "PICKLE",
    "PLAIN",
    "PLAIN_ITEMS_MAX",
    "PY_BOOL",
    "PY_COMPLEX",
    "PY_FLOAT",
    "PY_INT",
    "PY_NONE",
    "REFS_AT",
    "REF_BYTES",
    "Array",
    "ArrayInfo",
    "BroughtGlobals",
    "Encoded",
    "EncodedCall",
    "Folded",
    "Lender",
    "MakeRef",
    "NotPicklable",
    "RemoteTraceback",
    "ResolveRef",
    "Run",
    "Scan",
    "begin_main",
    "begin_run",
    "cause_of",
    "decode",
    "decode_call",
    "decode_error",
    "decode_function",
    "decode_with_carried",
    "describe_array",
    "digest",
    "drop_traceback",
    "dtype_name",
    "encode",
    "encode_array_head",
    "encode_call",
    "encode_error",
    "encode_function",
    "encode_out_of_band",
    "encode_short_error",
    "end_run",
    "error_name",
    "error_text",
    "exit_error",
    "failure_within",
    "fetching",
    "format_error",
    "function_name",
    "get_traceback",
    "is_bytes_alone",
    "large_copies",
    "named_dtype",
    "payload_kind",
    "portable_error",
    "raw_bytes",
    "read_contributors",
    "read_dependencies",
    "read_refs",
    "refuse_in_children",
    "register_future_type",
    "register_pickle_by_value",
    "reworded",
    "set_readers_path",
    "short_error",
    "text_of",
    "turn_to_output_owner",
    "with_text",
]
