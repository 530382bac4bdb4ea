"""Models in Hugging Face's layout: safetensors files, read and written in parts."""

import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import optree
import torch
from safetensors import SafetensorError, safe_open

from .._donate import refuse_donated
from .._errors import ArgumentError
from .._layout import short_dtype
from .._pieces import Piece, written_pieces
from .._target import Target
from .._tree import NAMESPACE, unflatten
from ._file import DTYPES, NAMES, File
from ._save import named_leaves
from ._together import CheckpointError, all_ranks

Rename = Callable[[str], str] | Mapping[str, str] | None

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def _named(tree: Any, rename: Rename) -> tuple[list[str], list[str], list[Any], Any]:
    """Paths and names of all leaves, the leaves, and the structure.

    Raises:
        ArgumentError: A leaf is no tensor, or two leaves have one name.
    """
    paths, leaves, spec = named_leaves(tree)
    accessors = optree.tree_accessors(tree, namespace=NAMESPACE)
    dotted = [".".join(str(entry.entry) for entry in a) for a in accessors]
    if isinstance(rename, Mapping):
        names = [rename.get(name, name) for name in dotted]
    else:
        names = [rename(name) for name in dotted] if rename else dotted
    owners: dict[str, str] = {}
    for path, name, leaf in zip(paths, names, leaves, strict=True):
        if not isinstance(leaf, torch.Tensor):
            raise ArgumentError(
                f"{path} is a {type(leaf).__qualname__}; safetensors hold tensors "
                "alone. Pass the tree of parameters."
            )
        if not isinstance(name, str) or name == "__metadata__":
            raise ArgumentError(
                f"{path} is called {name!r}, which names no tensor. Give rename= that "
                "returns a string for it."
            )
        if owners.setdefault(name, path) != path:
            raise ArgumentError(
                f"{path} and {owners[name]} are both called {name!r}. Give rename= "
                "that names them apart."
            )
    return paths, names, leaves, spec


# --- in -------------------------------------------------------------------------------


def load_safetensors(
    path: str | PathLike[str], like: Any, rename: Rename = None
) -> Any:
    """Read a tree of tensors from safetensors; each rank reads its rows.

    All ranks call it, with files that all of them see.

    Args:
        path: A file; or a folder with `model.safetensors.index.json` and the files that
            it names, with `model.safetensors`, or with other files of that ending.
        like: A tree of the shapes and dtypes that are needed, as for `load`. What else
            the files hold is left out.
        rename: From the name of a leaf to that of its tensor: a function, or a dict
            (names that it lacks stay). A leaf is called by its keys, joined by dots:
            `layers.0.query` for `tree['layers'][0]['query']`, and as the module called
            it for a tree that `yafsdp_fn.functional` has made.

    Returns:
        A tree like `like`, in new memory.

    Raises:
        CheckpointError: A file is missing or damaged; a tensor is missing or has
            another shape or dtype. On all ranks.
        ArgumentError: A leaf is no tensor, or two have one name.

    Example:
        >>> import tempfile, torch, yafsdp_fn as yf
        >>> folder = tempfile.mkdtemp()
        >>> yf.checkpoint.save_safetensors(folder, {"layers": [torch.ones(2)]})
        >>> like = {"w": torch.empty(2)}
        >>> yf.checkpoint.load_safetensors(folder, like, {"w": "layers.0"})
        {'w': tensor([1., 1.])}
    """

    def read() -> tuple[list[Target], Any]:
        paths, names, leaves, spec = _named(like, rename)
        file_of = _files(Path(path))
        rows = zip(paths, names, leaves, strict=True)
        return [_read_leaf(file_of, *row) for row in rows], spec

    targets, spec = all_ranks().together(read)
    return unflatten(spec, [target.leaf() for target in targets])


def _read_leaf(
    file_of: Mapping[str, Path], path: str, name: str, like: torch.Tensor
) -> Target:
    if name not in file_of:
        close = difflib.get_close_matches(name, file_of, cutoff=0.0)
        raise CheckpointError(
            f"{path}: no file has a tensor called {name!r}, but {len(file_of)} others, "
            f"such as {', '.join(close)}. Say with rename= how it is called."
        )
    target = Target(path, like)
    with _opened(file_of[name]) as file:
        part = file.get_slice(name)
        found = (DTYPES.get(part.get_dtype()), tuple(part.get_shape()))
        if found != (like.dtype, tuple(like.shape)):
            raise CheckpointError(
                f"{path}: {name!r} in {file_of[name]} is {part.get_dtype()}"
                f"{list(found[1])}, but {_shown(like)} is needed. Pass a like= of that "
                "shape and dtype, and convert what is loaded."
            )
        for offsets, tensor in target.pieces.items():
            for block in Piece(offsets, tensor).blocks():
                if block.tensor.dim() == 0:
                    block.tensor.copy_(file.get_tensor(name))
                elif block.tensor.numel():
                    block.tensor.copy_(part[block.index])
    return target


def _shown(tensor: torch.Tensor) -> str:
    return f"{NAMES.get(tensor.dtype, short_dtype(tensor.dtype))}{list(tensor.shape)}"


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{file} is missing or damaged ({error}), so nothing was loaded."
        ) from error


def _files(path: Path) -> dict[str, Path]:
    """The file of every tensor."""
    if path.is_file():
        return _names_in([path])
    index = path / INDEX
    if index.is_file():
        try:
            found = json.loads(index.read_text())["weight_map"]
            return {name: path / file for name, file in found.items()}
        except (ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"{index} is damaged ({error!r}), so nothing was loaded."
            ) from error
    files = [path / FILE] if (path / FILE).is_file() else [*path.glob("*.safetensors")]
    if any(_OURS.fullmatch(file.name) and file.name != FILE for file in files):
        raise CheckpointError(
            f"{path} holds parts of a model without their index, {INDEX}: a save was "
            "interrupted. Save it again, or give one of the files."
        )
    if not files:
        raise CheckpointError(
            f"{path} is no safetensors file and no folder that holds one. Give "
            f"a file, or a folder with {FILE}."
        )
    return _names_in(sorted(files))


def _names_in(files: Sequence[Path]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in files:
        with _opened(path) as file:
            found.update(dict.fromkeys(file.keys(), path))
    return found


# --- out ------------------------------------------------------------------------------


def save_safetensors(
    path: str | PathLike[str],
    tree: Any,
    rename: Rename = None,
    max_file_bytes: float = 5e9,
) -> None:
    """Write a tree of tensors as safetensors; each rank writes its rows.

    Nothing is gathered: every rank writes what it holds where it belongs in the files.
    A file gets its name when it is whole. All ranks call it.

    Args:
        path: A folder, for `model.safetensors`, or several files with an index if it
            gets too large; or one file, if it ends in `.safetensors`.
        tree: A tree of tensors and DTensors.
        rename: As for `load_safetensors`.
        max_file_bytes: Bytes above which a folder gets another file.

    Raises:
        ArgumentError: A leaf is no tensor, has a dtype that safetensors lack, or two
            have one name.
        DonatedError: A leaf's memory was donated to an earlier call.
        CheckpointError: A rank could not write. On all ranks.

    Example:
        >>> import tempfile, torch, yafsdp_fn as yf
        >>> from safetensors.torch import load_file
        >>> mesh = yf.make_mesh(fsdp=4, emulate=True)
        >>> params = yf.distribute({"w": torch.arange(6.0)}, mesh)
        >>> folder = tempfile.mkdtemp()
        >>> yf.checkpoint.save_safetensors(folder, params)
        >>> load_file(f"{folder}/model.safetensors")["w"]
        tensor([0., 1., 2., 3., 4., 5.])
    """
    ranks = all_ranks()
    target, files, pieces = ranks.together(
        lambda: _planned(path, tree, rename, max_file_bytes)
    )
    ranks.agree(target, {file.path.name: file.layout for file in files})
    try:
        ranks.of_first(lambda: _begin(files))
        ranks.together(lambda: _fill(files, pieces))
        ranks.of_first(lambda: _finish(target, files))
    finally:
        if ranks.first:  # what was there before is as it was
            for file in files:
                file.partial.unlink(missing_ok=True)


def _planned(
    path: str | PathLike[str], tree: Any, rename: Rename, max_bytes: float
) -> "tuple[Path, list[File], dict[str, list[Piece]]]":
    """Where to write which files, and what of them lies in this process."""
    paths, names, leaves, _ = _named(tree, rename)
    for leaf_path, leaf in zip(paths, leaves, strict=True):
        refuse_donated(leaf_path, leaf)
        if leaf.dtype not in NAMES:
            raise ArgumentError(
                f"{leaf_path} is {leaf.dtype}, which safetensors lack. Convert it."
            )
    rows = zip(paths, names, leaves, strict=True)
    pieces = {name: written_pieces(p, leaf) for p, name, leaf in rows}
    files = _plan(Path(path), dict(zip(names, leaves, strict=True)), max_bytes)
    return Path(path), files, pieces


def _plan(
    path: Path, leaves: Mapping[str, torch.Tensor], max_bytes: float
) -> list[File]:
    """Which tensors go to which file: those of large elements first, so all align."""
    order = sorted(leaves, key=lambda name: (-leaves[name].dtype.itemsize, name))
    if path.suffix == ".safetensors":
        return [File(path, {name: leaves[name] for name in order})]
    files = [File(path / FILE)]
    for name in order:
        if files[-1].leaves and files[-1].nbytes + leaves[name].nbytes > max_bytes:
            files.append(File(path / FILE))
        files[-1].leaves[name] = leaves[name]
    if len(files) > 1:
        for number, file in enumerate(files, 1):
            file.path = path / f"model-{number:05}-of-{len(files):05}.safetensors"
    return files


def _begin(files: Sequence[File]) -> None:
    for file in files:
        file.begin()


def _fill(files: Sequence[File], pieces: Mapping[str, Sequence[Piece]]) -> None:
    for file in files:
        file.fill(pieces)


def _finish(path: Path, files: Sequence[File]) -> None:
    """Give the files their names; what an earlier save has left beside them goes.

    While several files get theirs there is no index, so that no mixture is read.
    """
    if len(files) > 1:
        (path / INDEX).unlink(missing_ok=True)
    for file in files:
        file.partial.replace(file.path)
    if path.suffix == ".safetensors":
        return
    names = {name: file.path.name for file in files for name in file.leaves}
    if len(files) > 1:
        total = sum(file.nbytes for file in files)
        index = {"metadata": {"total_size": total}, "weight_map": names}
        partial = path / f".{INDEX}.partial"
        partial.write_text(json.dumps(index, indent=2))
        partial.replace(path / INDEX)
    else:
        (path / INDEX).unlink(missing_ok=True)
    for other in path.glob("model*.safetensors"):
        if _OURS.fullmatch(other.name) and other.name not in names.values():
            other.unlink()


_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
