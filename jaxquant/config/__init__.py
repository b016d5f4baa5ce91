"""From what a user writes to a recipe: the table, the rules, the config and its loader."""
