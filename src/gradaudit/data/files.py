"""Files and hub data sets, found and read."""

from pathlib import Path

from gradaudit.data.columns import pick
from gradaudit.data.named import NAMED, SetName, not_here
from gradaudit.data.spec import SourceSpec
from gradaudit.data.tables import Table, row_place
from gradaudit.errors import BadInputError


def found_file(path: str, base: Path, folders: bool = False) -> Path:
    """Return the file of a path, from a folder (the case file's) or else from the current one.

    Args:
        path: of the file.
        base: the folder.
        folders: a folder will do in place of a file.

    Raises:
        BadInputError: there is none, or it is a folder.
    """
    try:
        wanted = Path(path).expanduser()
        for folder in (base, Path()):
            file = folder / wanted
            if file.is_dir() and not folders:
                raise BadInputError(f"{path} is a folder; give the path of one file in it")
            if file.exists():
                if not file.is_dir() and not file.is_file():  # a pipe or a device has no end
                    raise BadInputError(f"{path} is no plain file; save its rows into one first")
                return file
    except (OSError, RuntimeError) as error:
        raise BadInputError(f"{path} cannot be looked up ({error}); check the path") from error
    tried = "" if wanted.is_absolute() else f" in {base.resolve()} or the current folder"
    raise BadInputError(f"there is no file {'or folder ' if folders else ''}{path}{tried}; check the path")


def hub_table(
    hub: str, spec: SourceSpec, label: str | int | None, image: str | int | None = None
) -> tuple[Table, tuple[str, ...]]:
    """Return the table of a hub data set, and the class names it declares for the label column.

    Args:
        hub: its id.
        spec: configuration and split.
        label: column of the label.
        image: column of images, which stay encoded.
    """
    try:
        import datasets
    except ImportError as error:
        raise BadInputError(
            "reading hub data sets needs the package datasets; pip install 'gradaudit[data]'"
        ) from error
    where = f"hub data set {hub}{f' ({spec.config})' if spec.config else ''}, split {spec.split}"
    try:
        loaded = datasets.load_dataset(hub, spec.config, split=spec.split)
    except Exception as error:  # any of dozens: network, hub, builder, pandas, arrow
        said = " ".join(str(error).split())
        raise BadInputError(
            f"{where} cannot be loaded ({type(error).__name__}: {said[:160]}); "
            "check the id, config, split and connection, or give a local file with path"
        ) from error
    if not len(loaded):
        raise BadInputError(f"{where} holds no rows; choose another split")
    names = tuple(loaded.column_names)
    table = Table(where, names, len(names), lambda number: list(loaded[names[number]]), row_place)
    declared: tuple[str, ...] = ()
    if image is not None:
        column = names[pick(table, "image", image)]
        if isinstance(loaded.features[column], datasets.Image):
            loaded = loaded.cast_column(column, datasets.Image(decode=False))
    if label is not None:
        feature = loaded.features[names[pick(table, "label", label)]]
        declared = tuple(getattr(feature, "names", None) or ())
    return table, declared


def named_hub_table(name: SetName, spec: SourceSpec) -> tuple[Table, tuple[str, ...]]:
    """Return the hub's table of a named set, and the class names it declares.

    Raises:
        BadInputError: it cannot be had; says both ways to get it.
    """
    known = NAMED[name]
    there = SourceSpec(hub=known.hub, config=known.config, split=spec.split)
    try:
        return hub_table(known.hub, there, known.hub_label, known.hub_image if known.images else None)
    except BadInputError as error:
        raise not_here(name, spec.split) from error
