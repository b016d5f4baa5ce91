"""The training program: a decoder language model trained from one YAML file, unquantized or under a config string."""
