"""Compare the literal names that type checkers need, and the vendored module's, with the table."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest

from megapg.collection import Groups, ProcessGroupCollection
from megapg.collection.mesh import Dimensions
from megapg.layout import FIELDS, GroupName
from megapg.layout.fields import TABLE
from megapg.megatron.vendored import process_groups
from megapg.upstream.mapping import OPTIONAL_FIELDS


def test_the_type_of_names_has_the_fields_of_the_table() -> None:
    assert tuple(TABLE) == FIELDS
    names = {name for part in get_args(GroupName) for name in get_args(part)}
    assert {f"gloo.{field}" for field in TABLE if field != "hcp"} <= names


def test_the_dimensions_of_a_mesh_are_fields_of_one_group() -> None:
    assert vars(Dimensions)["__annotations__"].keys() == TABLE.keys() - {"hcp"}


@pytest.mark.parametrize("kind", [ProcessGroupCollection, Groups])
def test_the_classes_have_the_fields_of_the_table(kind: type) -> None:
    written = {name: str(text) for name, text in vars(kind)["__annotations__"].items()}
    if kind is ProcessGroupCollection:
        written = {each.name: str(each.type) for each in dataclasses.fields(kind)}
    assert written.keys() == TABLE.keys()
    assert {name for name, text in written.items() if "None" in text} == {
        field for field, row in TABLE.items() if row.may_be_none
    }


def test_the_vendored_module_has_the_getters_of_the_table() -> None:
    of_table = {
        field: " ".join((row.getter, *row.flags)) for field, row in TABLE.items() if row.getter
    }
    assert of_table == process_groups._FIELDS
    assert process_groups._OPTIONAL == OPTIONAL_FIELDS
