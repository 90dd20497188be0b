"""What is known of a real data set beforehand, and how its class names are put into CLIP's words."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RealTask:
    """One real data set.

    Args:
        name: its usual name, which is also that of the torchvision class where there is one.
        hub_id: data set of the Hugging Face hub that holds images and labels.
        templates: CLIP's prompts.
        aliases: other names people write.
        hub_config: configuration of the hub's data set, where it has several.
        hub_splits: the hub's split -> ours, where the hub's name for it says something else.
        hub_names: class names by label, where the hub's labels are bare numbers or truth values.
        renamed: names in the source -> CLIP's names, whatever the case and hyphens.
        numbered: CLIP's names by label, for sources that number their classes or write them with other case or hyphens.
    """

    name: str
    hub_id: str
    templates: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    hub_config: str | None = None
    hub_splits: Mapping[str, str] = field(default_factory=dict)
    hub_names: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    numbered: tuple[str, ...] = ()


def clip_class_names(task: RealTask, names: Sequence[str]) -> list[str]:
    """Return a source's class names in CLIP's words; names that are in CLIP's words already stay.

    Example:
        >>> from mergeflow.modalities.vision.sources.real_tasks import REAL_TASKS
        >>> clip_class_names(REAL_TASKS["RESISC45"], ["mobile_home_park"])
        ['mobile home park']
        >>> clip_class_names(REAL_TASKS["MNIST"], ["0 - zero", "1 - one"])
        ['0', '1']
        >>> clip_class_names(REAL_TASKS["SUN397"], ["church/outdoor"])
        ['church outdoor']
        >>> clip_class_names(REAL_TASKS["OxfordIIITPet"], ["Maine Coon", "American_Bulldog"])
        ['Maine Coon', 'american bulldog']
    """
    if task.numbered and len(names) == len(task.numbered) and all(name.isdecimal() for name in names):
        return [task.numbered[int(name)] for name in names]
    if task.name in ("MNIST", "SVHN"):
        return [re.sub(r"^(\d) - \w+$", r"\1", name) for name in names]
    known = {plain(name): name for name in task.numbered}
    known.update((plain(name), clip) for name, clip in task.renamed.items())
    # Only in SUN397 is a slash a folder; in Cars and GTSRB it belongs to the name ("Ram C/V Cargo Van").
    joints = r"[_/]+" if task.name == "SUN397" else r"_+"
    return [known.get(plain(name)) or re.sub(joints, " ", name).strip() for name in names]


def plain(name: str) -> str:
    """Return a name without case, hyphens, underscores and spaces."""
    return re.sub(r"[-_ ]", "", name.lower())
