"""Others' names, each in terms of this package's own: nothing here computes what ``core`` and ``ops`` do not."""
