"""Put a backend's op into a model that knows nothing of jaxquant."""
