"""What validation/public_models.py runs, each model in a process of its own."""
