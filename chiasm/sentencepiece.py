"""Reads tokenizer.model, SentencePiece's file, as far as it is needed to do the same by merges.

Field numbers are those of sentencepiece_model.proto. The messages live in a pool of their own, so
that the library, should it be loaded as well, does not find its names taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

_PACKAGE = "chiasm.sentencepiece"
_BPE = 2
Field = descriptor_pb2.FieldDescriptorProto


class Kind(IntEnum):
    """What a piece is for."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Piece:
    """One entry of the vocabulary; its id is its place."""

    text: str
    score: float
    kind: Kind


def read_pieces(path: Path) -> tuple[Piece, ...]:
    """The vocabulary of a model that merges pieces by their scores (BPE).

    Raises:
        ValueError: No such file, a model of another kind, or one that changes text beforehand.
    """
    model = _message_class()()
    try:
        model.ParseFromString(path.read_bytes())
    except (OSError, message.DecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if model.trainer_spec.model_type != _BPE:
        raise ValueError(f"{path} is no BPE model")
    rules = model.normalizer_spec
    if rules.precompiled_charsmap or rules.remove_extra_whitespaces or rules.add_dummy_prefix:
        raise ValueError(f"{path} rewrites text ({rules.name}), which is not supported")
    return tuple(Piece(one.piece, one.score, Kind(one.type)) for one in model.pieces)


def _message_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="pieces.proto", package=_PACKAGE)
    _add(
        file,
        "Piece",
        ("piece", 1, Field.TYPE_STRING, ""),
        ("score", 2, Field.TYPE_FLOAT, "0"),
        ("type", 3, Field.TYPE_INT32, "1"),
    )
    _add(file, "TrainerSpec", ("model_type", 3, Field.TYPE_INT32, "1"))
    _add(
        file,
        "NormalizerSpec",
        ("name", 1, Field.TYPE_STRING, ""),
        ("precompiled_charsmap", 2, Field.TYPE_BYTES, ""),
        ("add_dummy_prefix", 3, Field.TYPE_BOOL, "true"),
        ("remove_extra_whitespaces", 4, Field.TYPE_BOOL, "true"),
    )
    model = file.message_type.add(name="Model")
    for number, (name, kind, label) in enumerate(
        (
            ("pieces", "Piece", Field.LABEL_REPEATED),
            ("trainer_spec", "TrainerSpec", Field.LABEL_OPTIONAL),
            ("normalizer_spec", "NormalizerSpec", Field.LABEL_OPTIONAL),
        ),
        1,
    ):
        model.field.add(
            name=name,
            number=number,
            type=Field.TYPE_MESSAGE,
            type_name=f".{_PACKAGE}.{kind}",
            label=label,
        )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Model"))


def _add(
    file: descriptor_pb2.FileDescriptorProto,
    name: str,
    *fields: tuple[str, int, Field.Type.ValueType, str],
) -> None:
    """A message of optional fields, each with what it is when it is left out."""
    added = file.message_type.add(name=name)
    for field, number, kind, default in fields:
        added.field.add(
            name=field,
            number=number,
            type=kind,
            label=Field.LABEL_OPTIONAL,
            default_value=default,
        )
