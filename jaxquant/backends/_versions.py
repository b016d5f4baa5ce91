"""Refuse a backend library outside the version range that was tested."""

from __future__ import annotations

import importlib.metadata


def require(package: str, series: str) -> None:
    """Check that an installed package belongs to a tested series of versions.

    Args:
      package: name on the package index.
      series: leading part of the version, such as ``"0.9."``.

    Raises:
      ImportError: the package is missing or of another series; says what to install.
    """
    fix = f"pip install '{package}=={series}*'"
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"{package} is not installed and this backend needs {series}*; run {fix}") from None
    if not found.startswith(series):
        raise ImportError(f"{package} {found} was not tested with this backend, which needs {series}*; run {fix}")
