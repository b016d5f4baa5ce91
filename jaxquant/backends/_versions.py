"""Refuse a backend library of a version that ``config.backends`` does not list as tested."""

from __future__ import annotations

import importlib.metadata


def require(package: str, series: str, title: str = "this backend") -> None:
    """Check that an installed package belongs to a tested series of versions.

    Args:
      package: name on the package index.
      series: leading part of the version, such as ``"0.9."``.
      title: what errors call the backend.

    Raises:
      ImportError: the package is missing or of another series; says what to install.
    """
    fix = f"pip install '{package}=={series}*'"
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(
            f"{package} is not installed, and {title}, on which this config's recipe runs, needs {series}*: run {fix}, "
            "or set quant_backend to 'native' where that has the recipe too"
        ) from None
    if not found.startswith(series):
        raise ImportError(f"{package} {found} was not tested with {title}, which needs {series}*; run {fix}")
