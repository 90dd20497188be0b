"""Arguments of methods: a frozen record, of which some may vary over the model and the experts."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import Field, PrivateAttr

from mergeflow.merging.matrices import Selection
from mergeflow.schema import Frozen


class Args(Frozen):
    """Arguments of a method; `scale` multiplies the direction, any real number (negative unlearns)."""

    scale: float = Field(1.0, description="factor of the direction; any real number")
    per_expert: ClassVar[tuple[str, ...]] = ()  # arguments that may have a value for each expert
    _varied: dict[str, Any] = PrivateAttr(default_factory=dict)
    _each: dict[str, tuple[float, ...]] = PrivateAttr(default_factory=dict)

    @property
    def varied(self) -> Mapping[str, Any]:
        """Arguments whose values vary over the model or the experts, as they were given."""
        return self._varied

    def each(self, key: str, count: int) -> tuple[float, ...]:
        """Return an argument's value for each of `count` experts, in sorted order."""
        return self._each.get(key) or (getattr(self, key),) * count

    def with_varied(self, varied: Mapping[str, Any]) -> Self:
        """Return the arguments with some that vary."""
        found = self.model_copy()
        found._varied = dict(varied)
        return found

    def with_values(self, values: Mapping[str, Any], each: Mapping[str, tuple[float, ...]]) -> Self:
        """Return the arguments for one tensor, with values of its own and others for each expert."""
        found = self.model_copy(update=dict(values))
        found._each = dict(each)
        return found

    def check_experts(self, count: int) -> None:
        """Check the arguments against the number of experts.

        Raises:
            MergeflowError: One that makes no sense with so many.
        """

    @property
    def needs_base(self) -> bool:
        """Whether the result depends on the base."""
        return True

    @property
    def selection(self) -> Selection | None:
        """Which matrices the method treats apart; None where it treats none."""
        found: Selection | None = getattr(self, "matrices", None)
        return found

    @property
    def uses(self) -> tuple[str, ...]:
        """Names of other methods that the method calls."""
        return ()

    @property
    def splits(self) -> bool:
        """Whether fused weights are cut into the matrices they hold."""
        return bool(getattr(self, "split_qkv", False))
