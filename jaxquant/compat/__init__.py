"""Other libraries' names, each translated into this package's own."""
