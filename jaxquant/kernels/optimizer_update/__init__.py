"""optimizer_update: one read of a gradient, weights and coded moments writes what an optimizer makes of them."""
