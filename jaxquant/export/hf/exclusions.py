"""Converters of exclusion lists in Hugging Face configs, from each library's syntax to regexes on module names."""

from __future__ import annotations

import re

from jaxquant.config.patterns import full_matcher

REGEX = "re:"
ANY_CLASS = "Linear"
_WRAPPERS = ("model.language_model.", "language_model.model.", "language_model.", "model.")
_ROUTER_GLOB = "gate*"


def transformers_pattern(key: str, place: str) -> str:
    """Return the regex of a ``modules_to_not_convert`` entry, for ``re.fullmatch`` on a module's dotted name.

    transformers excludes a module if the entry, as a regex, matches the start of its name up to a dot or the end, or if
    its name ends with the entry.

    Args:
      key: entry of the list.
      place: position of the entry, for the error.

    Raises:
      ValueError: the entry is empty, or is not a valid regex.

    Source: ``should_convert_module`` of transformers.
    """
    if not key:
        raise ValueError(f"{place} is empty; it must name a module")
    return check_regex(rf"{_wrap_in_group(key)}(?:(?<=\.)|(?=\.|$)).*|.*{re.escape(key)}", key, place)


def compressed_tensors_pattern(target: str, place: str) -> str:
    """Return the regex of an ``ignore`` or ``targets`` entry, for ``re.fullmatch`` on a module's dotted name.

    ``re:PATTERN`` matches from the start of the name (``re.match``). ``Linear`` matches every linear layer. Any other
    entry is the exact name of a module.

    Source: ``match_named_modules`` of compressed-tensors.
    """
    if target.startswith(REGEX):
        return check_regex(f"{_wrap_in_group(target[len(REGEX) :])}.*", target, place)
    return ".*" if target == ANY_CLASS else re.escape(target)


def modelopt_pattern(glob: str, place: str) -> str:
    """Return the regex of a modelopt exclusion, for ``re.fullmatch`` on a module's dotted name.

    The exclusion is a glob (``fnmatch``) that matches a module or one of its parents. Wrapper prefixes such as
    ``language_model.`` and ``model.`` are ignored. ``block_sparse_moe`` is equivalent to ``mlp``. ``gate*`` as the last
    part matches the router, but not ``gate_proj``.

    Source: ``read_modelopt_quantized_layers`` of MAX 26.7; ``is_layer_excluded`` of vLLM's modelopt.
    """
    if not glob:
        raise ValueError(f"{place} is empty; it must name a module")
    stripped = glob
    for wrapper in _WRAPPERS:
        stripped = stripped.removeprefix(wrapper)
    *above, last = stripped.removesuffix(".*").split(".")
    body = r"\.".join(map(_from_glob, above))
    end = r"gate(?!_proj|_up_proj)[^.]*" if last == _ROUTER_GLOB else _from_glob(last)
    wrappers = "".join(f"(?:{re.escape(wrapper)})?" for wrapper in ("model.", "language_model.", "model."))
    if body:
        body += r"\."
    return check_regex(rf"{wrappers}{body}{end}(?:\..*)?", glob, place)


def quark_pattern(entry: str, place: str) -> str:
    """Return the regex of a Quark ``exclude`` entry: ``re:PATTERN``, or a glob for a module or its parent."""
    return (compressed_tensors_pattern if entry.startswith(REGEX) else modelopt_pattern)(entry, place)


def _wrap_in_group(regex: str) -> str:
    """Wrap a regex in a group, and move leading flags such as ``(?i)`` into this group."""
    flags = re.match(r"\(\?([aimsux]+)\)", regex)
    return f"(?:{regex})" if flags is None else f"(?{flags[1]}:{regex[flags.end() :]})"


def _from_glob(part: str) -> str:
    """Return the regex of one part of a glob; ``*`` also matches dots, as in ``fnmatch``."""
    if part in ("mlp", "block_sparse_moe"):
        return "(?:mlp|block_sparse_moe)"
    known = {"*": ".*", "?": "."}
    pieces = re.split(r"(\*|\?|\[!?[^\]]+\])", part)
    regexes = (
        piece.replace("[!", "[^") if piece.startswith("[") and len(piece) > 2 else known.get(piece) or re.escape(piece)
        for piece in pieces
    )
    return "".join(regexes)


def check_regex(pattern: str, written: str, place: str) -> str:
    """Return a regex after checking that it compiles.

    Raises:
      ValueError: the pattern is not a regex; the message has the original entry and its position.
    """
    try:
        full_matcher(pattern)
    except ValueError as error:
        raise ValueError(f"{place} {written!r} is not a regular expression: {error}") from None
    return pattern
