"""The code of methods from outside the package, as recipes record it: only that code makes the result again."""

from collections.abc import Mapping
from typing import Any

from mergeflow.errors import MergeflowError
from mergeflow.merging.catalog import METHODS, MethodCall
from mergeflow.schema import Frozen


class Code(Frozen):
    """Where a method was declared, and the SHA-256 digest of its source."""

    place: str
    sha256: str


def code_of(call: MethodCall) -> dict[str, Code]:
    """Return the code of the methods that a call uses and that are not the package's own, by their names."""
    found = {name: METHODS.origin(name) for name in (call.name, *call.arguments.uses)}
    return {name: Code(place=one.place, sha256=one.digest) for name, one in found.items() if one.digest is not None}


def code_record(call: MethodCall) -> dict[str, Any]:
    """Return what a recipe says of a call's code: `code`, or nothing where all of it is the package's own."""
    found = {name: code.model_dump() for name, code in code_of(call).items()}
    return {"code": found} if found else {}


def check_known(name: str, recorded: Mapping[str, Code]) -> None:
    """Check that a method that a record names is here.

    Raises:
        MergeflowError: It is not; the message names where it was declared.
    """
    if name in recorded and name not in METHODS.names():
        raise MergeflowError(
            f"the method '{name}' was declared in '{recorded[name].place}', which is not here: put that file "
            "into the folder `methods` of a project and run the command there, or name it with --from."
        )


def check_code(recorded: Mapping[str, Code], call: MethodCall) -> None:
    """Check that the methods of a call are made of the code that a record names.

    Raises:
        MergeflowError: One is made of other code.
    """
    here = code_of(call)
    for name in (call.name, *call.arguments.uses):
        if name not in recorded or (name in here and recorded[name].sha256 == here[name].sha256):
            continue
        found = f"'{here[name].place}' ({here[name].sha256[:12]}…)" if name in here else "the package's own"
        raise MergeflowError(
            f"the method '{name}' is not the one that the recipe records: that is '{recorded[name].place}' "
            f"({recorded[name].sha256[:12]}…), this is {found}. Bring that code back, or remove `code` from the "
            "recipe to merge with what is here."
        )
