"""Settings of groups that train together."""

import re

from pydantic import BaseModel, ConfigDict, Field, field_validator


class GroupsConfig(BaseModel):
    """Several groups, each a run with learners and actors of its own, whose parameters a root (`tianji root`) fuses."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    root: str | None = Field(None, description="tcp://HOST:PORT of the root; null: this run trains by itself")
    every_learner_steps: int = Field(
        16, ge=1, description="a group brings the root what it has learned after so many updates"
    )
    learning_rate: float = Field(
        1.0, gt=0, description="of the root's outer optimiser; 1, with momentum 0, averages the groups' parameters"
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="of the outer optimiser (Nesterov); DiLoCo has 0.7 and 0.9")
    silence_seconds: float = Field(
        10.0, ge=3, description="a group that the root has not heard of for so long does not count until it is back"
    )

    @field_validator("root")
    @classmethod
    def _address(cls, root: str | None) -> str | None:
        match = root and re.fullmatch(r"tcp://[^\s/]+:(\d{1,5})", root)
        if root is not None and not (match and 1 <= int(match[1]) <= 65_535):
            raise ValueError(f"got {root!r}; it should be tcp://HOST:PORT with a PORT from 1 to 65535")
        return root
