"""Option types with a valid range.

The range is checked when a configuration is loaded, and is part of the JSON Schema.
"""

from typing import Annotated, TypeAlias

from pydantic import Field

AtLeast0: TypeAlias = Annotated[int, Field(ge=0)]
AtLeast1: TypeAlias = Annotated[int, Field(ge=1)]
Episodes: TypeAlias = Annotated[int, Field(le=1_000_000)]
Side: TypeAlias = Annotated[int, Field(ge=1, le=8192)]  # pixels
SmallSide: TypeAlias = Annotated[int, Field(ge=1, le=1024)]
Width: TypeAlias = Annotated[int, Field(le=65_536)]
Cores: TypeAlias = Annotated[int, Field(ge=1, le=1024)]
Above0: TypeAlias = Annotated[float, Field(gt=0)]
NotNegative: TypeAlias = Annotated[float, Field(ge=0)]
Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Majority: TypeAlias = Annotated[float, Field(gt=0.5, le=1)]
Below1: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
BelowHalf: TypeAlias = Annotated[float, Field(ge=0, lt=0.5)]
