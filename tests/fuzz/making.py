"""Legal values of a type, made from its declaration: samples where nobody has written any down."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import inspect as look

__all__ = ["legal"]

_PLAIN: dict[type, Any] = {
    look.IntType: 1,
    look.FloatType: 0.5,
    look.StrType: "text",
    look.BytesType: bytes(16),
    look.BoolType: True,
    look.NoneType: None,
    look.AnyType: [1, "any"],
}


def legal(kind: Any) -> list[Any]:
    """One value of each alternative of the type."""
    return _values(look.type_info(kind))


def _values(info: Any) -> list[Any]:
    if type(info) in _PLAIN:
        return [_PLAIN[type(info)]]
    if isinstance(info, look.UnionType):
        return [value for part in info.types for value in _values(part)]
    if isinstance(info, look.StructType):
        return _structs(info)
    if isinstance(info, look.DictType):
        return [{_one(info.key_type): _one(info.value_type)}]
    if isinstance(info, look.TupleType):
        return [tuple(map(_one, info.item_types))]
    if isinstance(info, look.ListType | look.VarTupleType):
        return [[_one(info.item_type)]]
    if isinstance(info, look.CustomType):  # made of bytes, as all of ours
        return [info.cls(bytes(16))]
    raise TypeError(f"no sample of {info}")


def _one(info: Any) -> Any:
    return _values(info)[0]


def _structs(info: look.StructType) -> list[Any]:
    """One for each alternative of each field, the others as in the first."""
    fields = {field.name: _values(field.type) for field in info.fields}
    first = {name: values[0] for name, values in fields.items()}
    made = [info.cls(**first)]
    for name, values in fields.items():
        made += [msgspec.structs.replace(made[0], **{name: value}) for value in values[1:]]
    return made
