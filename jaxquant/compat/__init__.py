"""Names of other libraries, translated to jaxquant's own."""
