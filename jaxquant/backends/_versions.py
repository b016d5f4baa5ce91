"""Check of the version of a backend's library against the tested versions in ``config.backends``."""

from __future__ import annotations

import importlib.metadata
import re
import warnings

from jaxquant.config.backends import BackendRow


def require(row: BackendRow) -> None:
    """Check that a backend's library is installed in a version that the backend runs on.

    Warns if the version is newer than the newest tested one.

    Args:
      row: row of the backend.

    Raises:
      ImportError: the library is missing, or older than the oldest version that passes the tests.
    """
    (oldest, newest), package = row.tested, row.package
    fix = f"run pip install '{package}>={oldest}', or set quant_backend: native"
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"quant_backend {row.title} needs {package}, which is not installed; {fix}") from None
    first, version, last = ([*map(int, re.findall(r"\d+", text)[:3])] for text in (oldest, found, newest))
    if version < first:
        raise ImportError(f"quant_backend {row.title} needs {package} {oldest} or newer, got {found}; {fix}")
    if version > last:
        fix = f"if results differ, run pip install '{package}<={newest}'"
        warnings.warn(f"jaxquant is tested with {package} up to {newest}, got {found}; {fix}", stacklevel=2)
