"""Translators of a recipe: AQT, Qwix and native. AQT and Qwix are imported here and nowhere else."""
