"""optimizer_update: an optimizer's update of weights and coded moments, in one read of each array."""
