"""What all sections of a configuration have in common."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

NameText = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused, docstrings are the field descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
