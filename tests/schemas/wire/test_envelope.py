from typing import Any

import msgspec
import pytest

from rolloutmq.schemas.wire.envelope import ColumnSpec, Dtype, Name, TableId


@pytest.mark.parametrize(("kind", "text"), [(Name, "w-1"), (TableId, "0" * 16)])
def test_a_name_on_the_wire_ends_with_its_last_letter(kind: Any, text: str) -> None:
    assert msgspec.convert(text, kind) == text
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(f"{text}\n", kind)


def test_so_does_the_name_of_a_column() -> None:
    assert msgspec.convert(["scores", Dtype.F64, 0], ColumnSpec).name == "scores"
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(["scores\n", Dtype.F64, 0], ColumnSpec)
