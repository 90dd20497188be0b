"""A part of a merge that travels: inputs go into the store, a worker writes files of the result, the store has them.

Of weights a worker fetches the headers first, which it plans the merge by, and a file when it reads a tensor of it. So
each machine gets what its part reads.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mergeflow.checkpoints.folders import folder_at
from mergeflow.checkpoints.formats import COMPANIONS, expanded, from_hub, weight_files
from mergeflow.checkpoints.reader import ABSENT
from mergeflow.commands.allocation import return_freed_memory
from mergeflow.merging import make_recipe
from mergeflow.merging.catalog import METHODS
from mergeflow.merging.execution.engine import BUFFER
from mergeflow.merging.files.card import published
from mergeflow.merging.files.output import OutputFolder, held_digests
from mergeflow.merging.files.plan import make_plan, open_inputs
from mergeflow.merging.files.recipe import Recipe, Resolve, local_path, with_paths
from mergeflow.merging.streaming import Job, counted
from mergeflow.merging.vocabulary.companions import MORE
from mergeflow.plugins import PRIVATE, texts_of
from tasks.project.stage import INPUTS, STATE, file_name
from tasks.running.parcel import Result, Sent, answered, current_folder, digest_of_work
from tasks.running.runner import progress_file, running_code
from tasks.travel.store import Store, StoreError, hashes_of, remove_path


@dataclass(frozen=True)
class MergeParcel(Sent):
    """Files of a merge's result to be written elsewhere.

    Attributes:
        recipe: as the result's files record it.
        inputs: of each path in the recipe what to `open`, the hashes of its `files`, and hash and size of `headers`.
        code: the user's own Python files that declare methods: of each its text and those that it imports, by name.
    """

    recipe: str
    device: str
    inputs: Mapping[str, Mapping[str, Any]]
    code: Sequence[Mapping[str, str]]
    files: Sequence[str] = ()

    @property
    def key(self) -> str:
        return f"merge-{self.work}-{file_name(self.address)}"

    def document(self, file: str) -> str:
        """Return the name of the document that says where the store has a file of the result."""
        return f"results/merge-{self.work}/{file}.json"

    def missing(self, files: Sequence[str], store: Store) -> list[str]:
        """Return the files of the result that the store has not."""
        noted = {file: store.read(self.document(file)) for file in files}
        return [file for file, of in noted.items() if of is None or not store.has(of["md5"])]

    def parts(self, parts: Sequence[Mapping[str, Any]]) -> list["MergeParcel"]:
        """Return a parcel for each part of the result's files of which some are to be written."""
        files = [[file for file in part if file in self.files] for part in parts]
        names = [f"{self.address}, part {number + 1} of {len(parts)}" for number in range(len(parts))]
        return [replace(self, address=name, files=some) for name, some in zip(names, files, strict=True) if some]


def pack_merge(job: Job, files: Sequence[str], resolve: Resolve | None, store: Store) -> MergeParcel:
    """Describe files of a merge for workers, and put what is read for those that the store has not there."""
    recipe, public = job.recipe, published(job.recipe)
    places = {name: _local(path, resolve) for name, path in zip(public.paths(), recipe.paths(), strict=True)}
    read = {name: _files_of(place) for name, place in places.items()}
    paths = [file for listed in read.values() for file in listed.values()]
    with TemporaryDirectory() as scratch:
        weights = [file for file in paths if file.suffix == ".safetensors"]
        headers = {file: _header(file, Path(scratch, str(number))) for number, file in enumerate(weights)}
        hashes = hashes_of([*paths, *headers.values()])
        sizes = {file: (hashes[header], file.stat().st_size) for file, header in headers.items()}
        inputs = {
            name: {
                "open": place.name if place.is_file() else "",
                "files": {file: hashes[path] for file, path in read[name].items()},
                "headers": {file: sizes[path] for file, path in read[name].items() if path in sizes},
            }
            for name, place in places.items()
        }
        modules = dict.fromkeys(METHODS.get(name).home for name, _ in recipe.code or ())
        code = [texts_of(module) for module in modules if module.startswith(PRIVATE)]
        facts = public.record(), recipe.device.partition(":")[0], inputs, code
        parcel = MergeParcel(store.uri, job.target.name, running_code(), digest_of_work(*facts), *facts)
        parcel = replace(parcel, files=parcel.missing(files, store))
        if parcel.files:
            store.send_files({md5: file for file, md5 in hashes.items()})
    return parcel


def _local(path: str, resolve: Resolve | None) -> Path:
    place = expanded(local_path(path, resolve))
    return place if place.exists() else from_hub(path)


def _files_of(place: Path) -> dict[str, Path]:
    """Return the files that a checkpoint is read from, with those that describe it, by name in its folder."""
    folder, described = (place if place.is_dir() else place.parent), folder_at(str(place))
    patterns = [] if described is None else [*COMPANIONS, f"{MORE}/*"]
    more = [file for pattern in patterns for file in sorted(folder.glob(pattern)) if file.is_file()]
    return {file.relative_to(folder).as_posix(): file for file in (*weight_files(place), *more)}


def _header(weights: Path, target: Path) -> Path:
    """Write the header of a safetensors file into a file of its own."""
    with weights.open("rb") as file:
        length = file.read(8)
        target.write_bytes(length + file.read(int.from_bytes(length, "little")))
    return target


def take_files(files: Sequence[str], parcel: MergeParcel, job: Job, folder: OutputFolder, store: Store) -> None:
    """Bring files of the result that workers have written into the folder that is being made."""
    for file in files:
        noted = store.read(parcel.document(file))
        if noted is None:
            raise StoreError(f"the store {store.uri} has lost what is noted of {file}: run again.")
        store.fetch(noted["md5"], folder.partial / file)
        if held_digests(folder.partial / file, job.shards[file]) != noted["digests"]:
            raise StoreError(f"{file} from the store {store.uri} is not what its worker wrote: run again.")
        for owner, digests in noted["inputs"].items():
            folder.inputs.setdefault(owner, {}).update(digests)
        folder.finish(file, noted["digests"], folder.inputs)


def merge_part(parcel: dict[str, Any]) -> dict[str, Any] | Exception:
    """Write files of a merge's result on this machine, which has nothing of the merge."""
    sent = MergeParcel(**parcel)
    return answered(sent, partial(_merge_part, sent))


def _merge_part(parcel: MergeParcel, store: Store, place: Path) -> Result:
    files = parcel.missing(parcel.files, store)
    if files:
        with (
            _laid_out(parcel, store, place) as places,
            current_folder(place),
            METHODS.with_files(_write_code(parcel, place)),
        ):
            recipe = make_recipe(json.loads(parcel.recipe), "the recipe that was sent")
            _write(with_paths(recipe, lambda path: str(places[path])), parcel, store, place, files)
        return_freed_memory()
    return Result({}, {}, {}, store.sent, store.fetched)


def _write(recipe: Recipe, parcel: MergeParcel, store: Store, place: Path, files: Sequence[str]) -> None:
    with open_inputs(recipe) as inputs, progress_file(place / STATE, file_name(parcel.address)) as report:
        plan = make_plan(recipe, inputs)
        share = (plan.passes - 1 + len(files) / len(plan.shards)) / plan.passes
        on_read = counted(partial(report, "merging"), int(plan.bytes_read * share))
        target = place / "out"
        job = Job(recipe, inputs, plan, target, on_read, None, BUFFER, device=parcel.device, record=parcel.recipe)
        job.write_shards(_Sending(target, parcel, store), {file: job.shards[file] for file in files})


class _Sending(OutputFolder):
    """A folder whose files go into the store as soon as they are whole, so that no other machine writes them again."""

    def __init__(self, target: Path, parcel: MergeParcel, store: Store) -> None:
        super().__init__(target)
        self._parcel, self._store = parcel, store
        self.partial.mkdir(exist_ok=True)

    def finish(self, file: str, digests: dict[str, str], inputs: dict[str, dict[str, str]]) -> None:
        """Put a file that is whole into the store, and note what it was made of."""
        md5 = self._store.send(self.partial / file)
        self._store.write(self._parcel.document(file), {"md5": md5, "digests": digests, "inputs": inputs})
        (self.partial / file).unlink()


@contextmanager
def _laid_out(parcel: MergeParcel, store: Store, place: Path) -> Iterator[dict[str, Path]]:
    """Give the place of each input while the block runs; a file of weights is there whole when its data is read."""
    places, absent = dict[str, Path](), list[tuple[int, int]]()
    try:
        for number, (name, of) in enumerate(parcel.inputs.items()):
            folder = place / INPUTS / str(number)
            places[name] = folder / of["open"]
            for file, md5 in of["files"].items():
                if file not in of["headers"]:
                    store.fetch(md5, folder / file)
                    continue
                header, size = of["headers"][file]
                _lay_header(header, size, folder / file, store)
                status = (folder / file).stat()
                absent.append((status.st_dev, status.st_ino))
                ABSENT[absent[-1]] = partial(store.fetch, md5, folder / file)
        yield places
    finally:
        for key in absent:
            del ABSENT[key]


def _lay_header(md5: str, size: int, target: Path, store: Store) -> None:
    """Make a file of a size that has a header and no data, and takes the room of the header."""
    store.fetch(md5, target)
    header = target.read_bytes()
    remove_path(target)  # it may be a link to the machine's copy
    with target.open("wb") as file:
        file.write(header)
        file.truncate(size)


def _write_code(parcel: MergeParcel, place: Path) -> list[Path]:
    """Write the user's own files of code, and return those that declare methods."""
    folders = [place / "code" / str(number) for number in range(len(parcel.code))]
    for folder, texts in zip(folders, parcel.code, strict=True):
        for name, text in texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
    return [folder / next(iter(texts)) for folder, texts in zip(folders, parcel.code, strict=True)]
