"""AQT as a backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax

from jaxquant.backends import aqt, aqt_serving
from jaxquant.backends.aqt_config import HONOURS, to_aqt
from jaxquant.backends.base import TRAINING, LibraryBackend, Op, OpOptions
from jaxquant.config.backends import check_implementation
from jaxquant.core.recipe import Recipe

Array = jax.Array


class AqtBackend(LibraryBackend):
    """AQT's Linen modules, and its op on converted kernels."""

    honours = HONOURS
    training, serving = aqt, aqt_serving
    op_names: ClassVar[Mapping[Op, str]] = {"dot_general": "AqtDotGeneral", "einsum": "AqtEinsum"}

    def check(self, recipe: Recipe) -> None:
        """Refuse a recipe that AQT does not honour in full; see ``Backend.check``."""
        super().check(recipe)
        to_aqt(recipe)  # refuses what does not go together

    def forward_config(self, recipe: Recipe) -> Any:
        """Return AQT's own config of a recipe; see ``Backend.forward_config``."""
        return to_aqt(recipe)

    def linen_op(self, op: Op, recipe: Recipe, options: OpOptions = TRAINING) -> Callable[[], Any]:
        """Make a factory of Linen modules; see ``Backend.linen_op``."""
        check_implementation(self.name, options.implementation)
        return aqt.linen_op(op, recipe, options)


BACKEND = AqtBackend("aqt")
