"""Work on a device, told before it starts: what it takes, whether it fits, and with which setting it would."""

from collections.abc import Callable
from dataclasses import dataclass

from mergeflow.errors import MergeflowError
from mergeflow.memory.needs import Need
from mergeflow.merging.device_memory import fits, free_bytes, in_bytes, with_torch

TOO_SMALL = "Not even one example at a time fits: take a smaller model or a larger device."


@dataclass(frozen=True)
class Work:
    """A piece of work on a device, and what it takes.

    Attributes:
        name: the stages or the command that does it.
        need: what it takes at its peak.
        way_out: free bytes to a sentence: with which setting it fits into them.
    """

    name: str
    need: Need
    way_out: Callable[[int], str]


@dataclass(frozen=True)
class Forecast:
    """What is going to be done on a device.

    Attributes:
        devices: names of those that may do it.
        free: free bytes of the fullest of them; None for the processor, which is never too small here.
        works: what is done on it.
    """

    devices: str
    free: int | None
    works: tuple[Work, ...]

    def refuse(self) -> None:
        """Refuse what cannot fit.

        Raises:
            MergeflowError: naming for each piece of work the setting with which it fits.
        """
        if self.free is None:
            return
        faults = [
            f"{work.name} needs about {in_bytes(with_torch(work.need.total))} of {self.devices}, where "
            f"{in_bytes(self.free)} are free: {in_words(work.need)}; torch itself takes the rest. "
            f"{work.way_out(self.free)}"
            for work in self.works
            if not fits(work.need.total, self.free)
        ]
        if faults:
            raise MergeflowError("\n".join(faults))


def forecast_on(device: str, *works: Work) -> Forecast:
    """Return the forecast of work on one device.

    Args:
        device: cpu, cuda, cuda:1 …
        works: what is done on it.
    """
    return Forecast(device, None if device == "cpu" else free_bytes(device), works)


def largest(most: int, need: Callable[[int], Need], free: int) -> int:
    """Return the largest number of examples, at most `most`, that fits at once; 0 where not even one does.

    Memory is linear in the number but for rounding, so that three predictions are enough.

    Args:
        most: the number to begin with.
        need: what a number takes.
        free: bytes of the device.
    """
    one = need(1).total
    if not fits(one, free):
        return 0
    slope = max((need(most).total - one) / max(most - 1, 1), 1.0)
    rows = min(most, 1 + int((free - with_torch(one)) / (with_torch(slope) - with_torch(0))))
    while rows > 1 and not fits(need(rows).total, free):
        rows = min(rows - 1, int(0.98 * rows))
    return rows


def fewer(setting: str, most: int, need: Callable[[int], Need], effect: str, free: int) -> str:
    """Say how many examples may be on the device at once.

    Args:
        setting: what decides it, as the user writes it.
        most: its value now.
        need: what a number of examples takes.
        effect: of a smaller value on the result.
        free: bytes of the device.
    """
    rows = largest(most, need, free)
    return f"Set {setting} to {rows}: {effect}." if rows else TOO_SMALL


def in_words(need: Need) -> str:
    """Return what takes the memory."""
    told = ", ".join(f"{name} {in_bytes(size)}" for name, size in need.parts().items() if size)
    return f"{told} ({in_bytes(need.activations / need.rows)} for each of {need.rows} examples)" if need.rows else told
