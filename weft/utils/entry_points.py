"""Entry points: names of extensions that installed packages declare, which weft imports on demand."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from weft.utils.errors import InputError, cause

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def find_entry_point(kind: str, name: str, builtins: Collection[str] = ()) -> EntryPoint | None:
    """Return the entry point `name` in the group `weft.KIND` of an installed package, which is not imported.

    Args:
        kind: Kind of extension, such as "loss".
        name: Name of the extension.
        builtins: Names of weft, for which the installed packages are not searched.

    Returns:
        The entry point, or None if no package declares one, or if the name is empty or built in.

    Raises:
        InputError: Two packages declare the name.
    """
    if not name or name in builtins:
        return None
    from importlib.metadata import entry_points

    points = [*entry_points(group=f"weft.{kind}", name=name)]
    if len(points) > 1:
        packages = " and ".join(sorted(package_of(point) for point in points))
        raise InputError(f"{kind} {name}: the packages {packages} both declare it: uninstall one of them")
    return points[0] if points else None


def load_entry_point(kind: str, name: str, builtins: Collection[str] = ()) -> Any | None:
    """Return the function or class that an installed package declares under a name, or None if there is none.

    Args:
        kind: Kind of extension.
        name: Name of the extension.
        builtins: Names of weft, for which the installed packages are not searched.

    Raises:
        InputError: It cannot be imported. The message names the package.
    """
    point = find_entry_point(kind, name, builtins)
    if point is None:
        return None
    try:
        extension = point.load()
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{kind} {name}: the package {package_of(point)} declares it as {point.value}, which cannot be imported "
            f"({cause(error)}): update or uninstall the package"
        ) from error
    if not callable(extension):
        raise InputError(
            f"{kind} {name}: the package {package_of(point)} declares it as {point.value}, which is a "
            f"{type(extension).__name__}, no function or class: update or uninstall the package"
        )
    return extension


def package_of(point: EntryPoint) -> str:
    """Return the name of the package that declares an entry point."""
    return point.dist.name if point.dist else point.module
