"""User config: the table of recipes, the rules, the config class and its loader."""
