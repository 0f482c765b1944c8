"""Settings of the replay of off-policy agents."""

from pydantic import BaseModel, ConfigDict, Field


class ReplayConfig(BaseModel):
    """What off-policy agents learn from; on-policy agents have no replay.

    Steps are environment steps. In steps, `learner.trajectories_per_update` trajectories are inserted at once.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    capacity: int = Field(100_000, ge=1, description="steps held on all devices together; the oldest go first")
    min_size: int = Field(1_000, ge=1, description="steps inserted before the first update, also after a resume")
    batch_size: int = Field(
        128,
        ge=1,
        description="transitions, or unrolls if the agent is recurrent, drawn for a gradient step, on all devices",
    )
    gradient_steps: int = Field(
        1, ge=1, description="gradient steps in one update: one program, which makes one policy version"
    )
    samples_per_insert: float = Field(
        8.0, gt=0, description="how often a step is drawn on average; learner and actors wait for each other to keep it"
    )
    tolerance: float | None = Field(
        None,
        gt=0,
        description="samples that may be drawn too many or too few before somebody waits; null: those of one insert "
        "and one update",
    )
    frame_stack: int | None = Field(
        None,
        ge=2,
        description="images are stacks of so many frames along their first axis, which each step shifts by one: hold "
        "each frame once; null: hold images as they are",
    )
    prioritised: bool = Field(False, description="draw by priority (Schaul et al. 2016) instead of uniformly")
    alpha: float = Field(0.6, ge=0, le=1, description="exponent of the priorities; 0 is uniform")
    beta: float = Field(0.4, ge=0, le=1, description="exponent of the importance weights at first; 1 corrects fully")
    beta_learner_steps: int | None = Field(
        None, ge=1, description="updates in which beta rises to 1; null: it stays as it is"
    )
    max_lag: int | None = Field(
        None, ge=0, description="steps of a policy that is more versions old are not drawn; null: any age"
    )
    save: bool = Field(False, description="save what it holds with each checkpoint; it begins empty otherwise")

    def samples_per_update(self, steps_per_draw: int) -> int:
        """Steps drawn in one update, over all devices.

        Args:
          steps_per_draw: 1 where transitions are drawn, the steps of an unroll where these are.
        """
        return self.batch_size * self.gradient_steps * steps_per_draw

    def problem(self, steps_per_insert: int, samples_per_update: int) -> str | None:
        """What does not fit together, in words; None when all does.

        Args:
          steps_per_insert: at most so many are inserted at once.
          samples_per_update: so many are drawn at once.
        """
        if self.capacity < steps_per_insert:
            return (
                f"replay.capacity is {self.capacity:,}, less than the {steps_per_insert:,} steps of one insert "
                "(learner.trajectories_per_update x actors.environments x actors.unroll_length): make it larger"
            )
        if self.min_size > self.capacity:
            return f"replay.min_size ({self.min_size:,}) must not exceed replay.capacity ({self.capacity:,})"
        least = least_tolerance(self.samples_per_insert, steps_per_insert, samples_per_update)
        if self.tolerance is not None and self.tolerance < least:
            return (
                f"replay.tolerance is {self.tolerance:g} samples, with which learner and actors would wait for each "
                f"other forever: an insert of {steps_per_insert:,} steps and an update of "
                f"{samples_per_update:,} samples need {least:g} or more"
            )
        return None


def least_tolerance(samples_per_insert: float, steps_per_insert: int, samples_per_update: int) -> float:
    """The smallest tolerance with which at any time an insert or an update is allowed, in samples."""
    brought = samples_per_insert * steps_per_insert
    return max(brought, (brought + samples_per_update) / 2)
